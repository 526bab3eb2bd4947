# A monthly budget for everything with the deployment's label. It sends e-mails; it stops nothing.

locals {
  has_budget = var.budget_amount > 0
}

resource "google_billing_budget" "deployment" {
  count = local.has_budget ? 1 : 0

  billing_account = var.billing_account
  display_name    = "drivetrain (${var.project_id}, ${var.deployment})"

  budget_filter {
    projects = ["projects/${var.project_id}"]
    labels   = local.labels
  }

  amount {
    specified_amount {
      units = tostring(floor(var.budget_amount))
      nanos = floor((var.budget_amount - floor(var.budget_amount)) * 1000000000)
    }
  }

  dynamic "threshold_rules" {
    for_each = [0.5, 0.9, 1.0]
    content {
      threshold_percent = threshold_rules.value
    }
  }

  depends_on = [google_project_service.api]
}
