# The master and the workers.

locals {
  suffix     = var.deployment == "default" ? "" : "-${var.deployment}"
  labels     = { drivetrain = var.deployment }
  note       = "drivetrain=${var.deployment}" # the description of what cannot have labels
  is_spot    = var.spot || var.preemptible
  is_limited = local.is_spot || var.max_run_minutes > 0

  built_in_count = try(local.built_in_gpus[var.accelerator_type][var.gpu_machine_type], 0)
  num_gpus       = !var.use_gpu ? 0 : var.gpus_per_machine > 0 ? var.gpus_per_machine : max(1, local.built_in_count)

  zones       = length(var.zones) > 0 ? var.zones : [var.zone]
  master_zone = var.master_zone != "" ? var.master_zone : local.zones[0]
  worker_zones = [
    for number in range(var.num_workers) : var.worker_zone != "" ? var.worker_zone : local.zones[(number + 1) % length(local.zones)]
  ]

  # Name -> zone. The first worker's name has no number, so that a second one does not rename it.
  worker_names = [for number in range(var.num_workers) : number == 0 ? "dt-worker${local.suffix}" : "dt-worker-${number + 1}${local.suffix}"]
  master_name  = "dt-master${local.suffix}"
  machines = !var.enable_gcp_backend ? {} : merge(
    { (local.master_name) = local.master_zone },
    { for number in range(var.num_workers) : local.worker_names[number] => local.worker_zones[number] },
  )

  ranks = { for rank, name in concat([local.master_name], local.worker_names) : name => rank }

  # What the scripts know of this deployment. All values are checked by variables.tf.
  settings = join("\n", [
    "#!/bin/bash",
    "# shellcheck disable=SC2034  # not every script uses every setting",
    "USE_GPU=${var.use_gpu}",
    "NUM_GPUS=${local.num_gpus}",
    "SSH_USER=${var.ssh_user}",
    "IDLE_MINUTES=${var.idle_minutes}",
    "SAVE_SECONDS=${local.is_spot ? 25 : 80}", # Google grants 30 s when it takes a spot machine back, else 90 s
    "",
  ])
  library     = "${local.settings}${file("${path.module}/scripts/library.sh")}"
  idle_script = "${local.library}${file("${path.module}/scripts/idle.sh")}"
  startup_script = join("", [
    local.library,
    "IDLE_SCRIPT='${base64encode(local.idle_script)}'\n",
    file("${path.module}/scripts/startup.sh"),
  ])
  shutdown_script = "${local.library}${file("${path.module}/scripts/save.sh")}"
}

resource "google_compute_instance" "machine" {
  for_each = local.machines

  name         = each.key
  zone         = each.value
  machine_type = var.use_gpu ? var.gpu_machine_type : var.machine_type
  tags         = ["distributed-training"]
  labels       = merge(local.labels, { drivetrain-rank = tostring(local.ranks[each.key]) })

  desired_status            = "RUNNING" # apply starts a machine again that was preempted or idle
  allow_stopping_for_update = true

  boot_disk {
    auto_delete = true
    initialize_params {
      image  = "debian-cloud/debian-12"
      size   = var.boot_disk_gb
      type   = "pd-balanced"
      labels = local.labels
    }
  }

  # Machine types of the families g2 and a2 come with their GPUs.
  dynamic "guest_accelerator" {
    for_each = var.use_gpu && local.built_in_count == 0 ? [local.num_gpus] : []
    content {
      type  = var.accelerator_type
      count = guest_accelerator.value
    }
  }

  scheduling {
    provisioning_model          = local.is_spot ? "SPOT" : "STANDARD"
    preemptible                 = local.is_spot
    automatic_restart           = !local.is_limited
    on_host_maintenance         = var.use_gpu || local.is_spot ? "TERMINATE" : "MIGRATE"
    instance_termination_action = local.is_limited ? "STOP" : null # the disk stays, with the checkpoints on it

    dynamic "max_run_duration" {
      for_each = var.max_run_minutes > 0 ? [var.max_run_minutes * 60] : []
      content {
        seconds = max_run_duration.value
      }
    }
  }

  network_interface {
    subnetwork = google_compute_subnetwork.machines[0].id
    access_config {} # an address of its own: packages and images come from the internet
  }

  service_account {
    email  = google_service_account.machine[0].email
    scopes = ["cloud-platform"] # its roles decide what it may do (access.tf)
  }

  shielded_instance_config {
    enable_secure_boot          = false # the driver's kernel module is built on the machine, without a signature
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }

  metadata = merge(
    {
      startup-script  = local.startup_script
      shutdown-script = local.shutdown_script
    },
    var.ssh_public_key == "" ? {} : {
      ssh-keys               = "${var.ssh_user}:${trimspace(var.ssh_public_key)}"
      block-project-ssh-keys = "TRUE"
      enable-oslogin         = "FALSE"
    },
  )

  depends_on = [google_project_service.api, google_compute_firewall.between_machines]
}
