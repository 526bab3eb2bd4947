# The bucket of runs and finished models, and the registry of images.

resource "google_storage_bucket" "models" {
  name                        = "${replace(var.project_id, "/[.:]/", "-")}-distributed-training${local.suffix}"
  location                    = var.region
  labels                      = local.labels
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
  force_destroy               = false # destroy never deletes models

  # By default Google keeps, and charges for, deleted checkpoints for a week.
  soft_delete_policy {
    retention_duration_seconds = 0
  }

  lifecycle_rule {
    condition {
      age = 7
    }
    action {
      type = "AbortIncompleteMultipartUpload"
    }
  }

  lifecycle_rule {
    condition {
      age            = 7
      matches_prefix = ["build/"]
    }
    action {
      type = "Delete"
    }
  }

  dynamic "lifecycle_rule" {
    for_each = var.run_retention_days > 0 ? [var.run_retention_days] : []
    content {
      condition {
        age            = lifecycle_rule.value
        matches_prefix = ["runs/"]
      }
      action {
        type = "Delete"
      }
    }
  }

  depends_on = [google_project_service.api]
}

resource "google_artifact_registry_repository" "images" {
  repository_id = "drivetrain${local.suffix}"
  location      = var.region
  format        = "DOCKER"
  description   = "Images of drivetrain"
  labels        = local.labels

  depends_on = [google_project_service.api]
}
