terraform {
  required_version = ">= 1.9" # a variable's validation may refer to other variables

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 6.50"
    }
  }
}

provider "google" {
  project = var.project_id
  region  = var.region
  zone    = var.zone

  # Google asks for a project that pays for calls to the API of budgets.
  user_project_override = local.has_budget
  billing_project       = local.has_budget ? var.project_id : null
}
