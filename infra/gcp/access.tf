# What the machines, Cloud Build and its user may do.

locals {
  has_cloud_build = var.cloud_build_user != ""
  services = concat(
    ["iam.googleapis.com", "storage.googleapis.com", "artifactregistry.googleapis.com"],
    var.enable_gcp_backend ? ["compute.googleapis.com"] : [],
    local.has_cloud_build ? ["cloudbuild.googleapis.com"] : [],
    local.has_budget ? ["billingbudgets.googleapis.com"] : [],
  )
}

resource "google_project_service" "api" {
  for_each = toset(local.services)

  service            = each.value
  disable_on_destroy = false # others in the project may use it
}

resource "google_service_account" "machine" {
  count = var.enable_gcp_backend ? 1 : 0

  account_id   = "dt-vm-${var.deployment}"
  display_name = "drivetrain's machines (${var.deployment})"
  description  = local.note

  depends_on = [google_project_service.api]
}

# The machines read and write this bucket, and read this deployment's images. Nothing else.
resource "google_storage_bucket_iam_member" "machine" {
  count = var.enable_gcp_backend ? 1 : 0

  bucket = google_storage_bucket.models.name
  role   = "roles/storage.objectUser"
  member = "serviceAccount:${google_service_account.machine[0].email}"
}

resource "google_artifact_registry_repository_iam_member" "machine" {
  count = var.enable_gcp_backend ? 1 : 0

  location   = google_artifact_registry_repository.images.location
  repository = google_artifact_registry_repository.images.name
  role       = "roles/artifactregistry.reader"
  member     = "serviceAccount:${google_service_account.machine[0].email}"
}

# --- Cloud Build ---------------------------------------------------------------------------------

resource "google_service_account" "build" {
  count = local.has_cloud_build ? 1 : 0

  account_id   = "dt-build-${var.deployment}"
  display_name = "drivetrain's image builds (${var.deployment})"
  description  = local.note

  depends_on = [google_project_service.api]
}

resource "google_artifact_registry_repository_iam_member" "build" {
  count = local.has_cloud_build ? 1 : 0

  location   = google_artifact_registry_repository.images.location
  repository = google_artifact_registry_repository.images.name
  role       = "roles/artifactregistry.writer"
  member     = "serviceAccount:${google_service_account.build[0].email}"
}

# The sources of a build are below build/ in the bucket.
resource "google_storage_bucket_iam_member" "build" {
  for_each = local.has_cloud_build ? {
    build = "serviceAccount:${google_service_account.build[0].email}"
    user  = "user:${var.cloud_build_user}"
  } : {}

  bucket = google_storage_bucket.models.name
  role   = each.key == "build" ? "roles/storage.objectViewer" : "roles/storage.objectUser"
  member = each.value
}

resource "google_project_iam_member" "build_log" {
  count = local.has_cloud_build ? 1 : 0

  project = var.project_id
  role    = "roles/logging.logWriter"
  member  = "serviceAccount:${google_service_account.build[0].email}"
}

resource "google_project_iam_member" "build_user" {
  for_each = local.has_cloud_build ? toset(["roles/cloudbuild.builds.editor", "roles/serviceusage.serviceUsageConsumer", "roles/logging.viewer"]) : []

  project = var.project_id
  role    = each.value
  member  = "user:${var.cloud_build_user}"
}

resource "google_service_account_iam_member" "build_user" {
  count = local.has_cloud_build ? 1 : 0

  service_account_id = google_service_account.build[0].name
  role               = "roles/iam.serviceAccountUser"
  member             = "user:${var.cloud_build_user}"
}
