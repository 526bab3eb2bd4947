locals {
  # The machines in the order of their ranks: the master, then the workers. An address is "" while a machine is stopped.
  listed = [
    for name in concat([local.master_name], local.worker_names) : {
      name        = name
      zone        = google_compute_instance.machine[name].zone
      external_ip = try(google_compute_instance.machine[name].network_interface[0].access_config[0].nat_ip, "")
      internal_ip = try(google_compute_instance.machine[name].network_interface[0].network_ip, "")
    } if contains(keys(local.machines), name)
  ]
}

output "project_id" {
  value = var.project_id
}

output "deployment" {
  value = var.deployment
}

output "region" {
  value = var.region
}

output "zone" {
  value = var.zone
}

output "master_zone" {
  value = local.master_zone
}

output "worker_zone" {
  description = "The first worker's zone."
  value       = try(local.worker_zones[0], local.master_zone)
}

output "use_gpu" {
  value = var.use_gpu
}

output "gpus_per_machine" {
  value = local.num_gpus
}

output "machine_type" {
  value = var.use_gpu ? var.gpu_machine_type : var.machine_type
}

output "ssh_user" {
  value = var.ssh_user
}

output "machines" {
  description = "All machines, the master first: name, zone, external_ip, internal_ip."
  value       = local.listed
}

output "master_ip" {
  value = try(local.listed[0].external_ip, "")
}

output "worker_ip" {
  value = try(local.listed[1].external_ip, "")
}

output "worker_ips" {
  value = [for number, machine in local.listed : machine.external_ip if number > 0]
}

output "master_internal_ip" {
  value = try(local.listed[0].internal_ip, "")
}

output "internal_ips" {
  value = [for machine in local.listed : machine.internal_ip]
}

output "model_bucket" {
  value = google_storage_bucket.models.name
}

output "inference_url" {
  description = "Guide 000's address of the model server on Cloud Run. Always \"\": drivetrain runs no server there. The name exists so that scripts written for the guide can read it; null would remove it."
  value       = ""
}

output "image_repository" {
  description = "Where images are pushed: REPOSITORY/NAME:TAG"
  value       = "${var.region}-docker.pkg.dev/${var.project_id}/${google_artifact_registry_repository.images.repository_id}"
}

output "build_service_account" {
  description = "The account of Cloud Build, for gcloud builds submit --service-account; \"\" without cloud_build_user."
  value       = try(google_service_account.build[0].name, "")
}
