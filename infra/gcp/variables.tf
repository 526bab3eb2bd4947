# --- project -------------------------------------------------------------------------------------

variable "project_id" {
  type        = string
  description = "The project in which everything is created."

  validation {
    condition     = can(regex("^([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project_id))
    error_message = "project_id must be the ID of a project (6 to 30 lower-case letters, digits and hyphens), not its name: gcloud projects list"
  }
}

variable "deployment" {
  type        = string
  default     = "default"
  description = "Name of this set of machines. Everything that can have a label gets drivetrain=DEPLOYMENT; any other than \"default\" is also a suffix of all names."

  validation {
    condition     = can(regex("^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$", var.deployment))
    error_message = "deployment must be 1 to 20 lower-case letters, digits and hyphens, and begin with a letter."
  }
}

variable "cloud_build_user" {
  type        = string
  default     = ""
  description = "E-mail address of a user who may build images with Cloud Build. Empty: Cloud Build is not set up."

  validation {
    condition     = var.cloud_build_user == "" || can(regex("^[^@\\s:]+@[^@\\s:]+\\.[^@\\s:]+$", var.cloud_build_user))
    error_message = "cloud_build_user must be an e-mail address, without \"user:\" before it."
  }
}

variable "enable_gcp_backend" {
  type        = bool
  default     = true
  description = "Whether there are machines. With false everything that is paid by the hour is removed, and the bucket stays."
}

# --- place ---------------------------------------------------------------------------------------

variable "region" {
  type        = string
  default     = "us-central1"
  description = "The region of all machines, of the network and of the bucket."

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = "region must be the name of a region, such as us-central1: gcloud compute regions list"
  }
}

variable "zone" {
  type        = string
  default     = "us-central1-a"
  description = "The zone of all machines, unless the variables below name others."

  validation {
    condition     = startswith(var.zone, "${var.region}-") || length(var.zones) > 0
    error_message = "The zone ${var.zone} is not in the region ${var.region}: change zone or region (traffic between regions is slow, and costs money)."
  }
  validation {
    condition = (
      !var.use_gpu || !var.check_gpu_zones || length(var.zones) > 0 || (var.master_zone != "" && (var.worker_zone != "" || var.num_workers == 0)) ||
      contains(lookup(local.gpu_zones, var.accelerator_type, [var.zone]), var.zone)
    )
    error_message = "${var.zone} has no ${var.accelerator_type}. It is in ${join(", ", [for zone in lookup(local.gpu_zones, var.accelerator_type, []) : zone if startswith(zone, "${split("-", var.zone)[0]}-")])}. If that is out of date: check_gpu_zones = false"
  }
}

variable "zones" {
  type        = list(string)
  default     = []
  description = "Several zones of the region: the machines are spread over them in turn, the master first. Empty: all are in `zone`."

  validation {
    condition     = alltrue([for zone in var.zones : startswith(zone, "${var.region}-")])
    error_message = "All zones must be in the region ${var.region}; ${join(", ", [for zone in var.zones : zone if !startswith(zone, "${var.region}-")])} is not (traffic between regions is slow, and costs money)."
  }
  validation {
    condition     = !var.use_gpu || !var.check_gpu_zones || alltrue([for zone in var.zones : contains(lookup(local.gpu_zones, var.accelerator_type, [zone]), zone)])
    error_message = "${join(", ", [for zone in var.zones : zone if !contains(lookup(local.gpu_zones, var.accelerator_type, [zone]), zone)])} has no ${var.accelerator_type}. In ${var.region} it is in: ${join(", ", [for zone in lookup(local.gpu_zones, var.accelerator_type, []) : zone if startswith(zone, "${var.region}-")])}. If that is out of date: check_gpu_zones = false"
  }
}

variable "master_zone" {
  type        = string
  default     = ""
  description = "The master's zone, if it is another one. A region may have free GPUs in different zones."

  validation {
    condition     = var.master_zone == "" || startswith(var.master_zone, "${var.region}-")
    error_message = "The zone ${var.master_zone} is not in the region ${var.region}: change master_zone or region (traffic between regions is slow, and costs money)."
  }
  validation {
    condition     = var.master_zone == "" || !var.use_gpu || !var.check_gpu_zones || contains(lookup(local.gpu_zones, var.accelerator_type, [var.master_zone]), var.master_zone)
    error_message = "${var.master_zone} has no ${var.accelerator_type}. In ${var.region} it is in: ${join(", ", [for zone in lookup(local.gpu_zones, var.accelerator_type, []) : zone if startswith(zone, "${var.region}-")])}. If that is out of date: check_gpu_zones = false"
  }
}

variable "worker_zone" {
  type        = string
  default     = ""
  description = "The workers' zone, if it is another one."

  validation {
    condition     = var.worker_zone == "" || startswith(var.worker_zone, "${var.region}-")
    error_message = "The zone ${var.worker_zone} is not in the region ${var.region}: change worker_zone or region (traffic between regions is slow, and costs money)."
  }
  validation {
    condition     = var.worker_zone == "" || !var.use_gpu || !var.check_gpu_zones || contains(lookup(local.gpu_zones, var.accelerator_type, [var.worker_zone]), var.worker_zone)
    error_message = "${var.worker_zone} has no ${var.accelerator_type}. In ${var.region} it is in: ${join(", ", [for zone in lookup(local.gpu_zones, var.accelerator_type, []) : zone if startswith(zone, "${var.region}-")])}. If that is out of date: check_gpu_zones = false"
  }
}

variable "check_gpu_zones" {
  type        = bool
  default     = true
  description = "Whether zones without the GPU are refused, according to the table in gpus.tf. false: for a zone that is newer than the table."
}

# --- machines ------------------------------------------------------------------------------------

variable "num_workers" {
  type        = number
  default     = 1
  description = "Machines beside the master: dt-worker, dt-worker-2, ..."

  validation {
    condition     = var.num_workers >= 0 && var.num_workers <= 99 && floor(var.num_workers) == var.num_workers
    error_message = "num_workers must be a whole number from 0 to 99."
  }
}

variable "machine_type" {
  type        = string
  default     = "e2-medium"
  description = "The machines' type, if use_gpu is false."

  validation {
    condition     = can(regex("^[a-z][a-z0-9]*-[a-z0-9-]+$", var.machine_type))
    error_message = "machine_type must be the name of a machine type, such as e2-medium: gcloud compute machine-types list"
  }
}

variable "boot_disk_gb" {
  type        = number
  default     = 50
  description = "Size of each machine's disk in GB. The driver, Docker and an environment with torch need about 25."

  validation {
    condition     = var.boot_disk_gb >= 20 && var.boot_disk_gb <= 65536
    error_message = "boot_disk_gb must be from 20 to 65536."
  }
}

variable "use_gpu" {
  type        = bool
  default     = true
  description = "Whether the machines have GPUs."
}

variable "accelerator_type" {
  type        = string
  default     = "nvidia-tesla-t4"
  description = "The GPU: nvidia-tesla-t4, nvidia-tesla-v100, nvidia-tesla-p100 or nvidia-tesla-p4 (n1), nvidia-l4 (g2), nvidia-tesla-a100 or nvidia-a100-80gb (a2)."

  validation {
    condition     = !var.use_gpu || contains(keys(local.gpu_zones), var.accelerator_type)
    error_message = "accelerator_type must be one of ${join(", ", keys(local.gpu_zones))}."
  }
}

variable "gpu_machine_type" {
  type        = string
  default     = "n1-standard-4"
  description = "The machines' type, if use_gpu is true."

  validation {
    condition = (
      !var.use_gpu || !contains(keys(local.gpu_zones), var.accelerator_type) ||
      (contains(keys(local.attachable_gpus), var.accelerator_type) && can(regex("^n1-(standard|highmem|highcpu)-[0-9]+$|^n1-custom-[0-9]+-[0-9]+(-ext)?$", var.gpu_machine_type))) ||
      contains(keys(lookup(local.built_in_gpus, var.accelerator_type, {})), var.gpu_machine_type)
    )
    error_message = "${var.gpu_machine_type} cannot have a ${var.accelerator_type}. gpu_machine_type must be one of: ${lookup(local.machine_types_of_gpu, var.accelerator_type, "")}."
  }
}

variable "gpus_per_machine" {
  type        = number
  default     = 0
  description = "GPUs in each machine. 0: as many as the machine type comes with; 1 with n1."

  validation {
    condition     = var.gpus_per_machine >= 0 && floor(var.gpus_per_machine) == var.gpus_per_machine
    error_message = "gpus_per_machine must be a whole number."
  }
  validation {
    condition = (
      !var.use_gpu || var.gpus_per_machine == 0 ||
      try(local.built_in_gpus[var.accelerator_type][var.gpu_machine_type] == var.gpus_per_machine, true)
    )
    error_message = "${var.gpu_machine_type} has ${try(local.built_in_gpus[var.accelerator_type][var.gpu_machine_type], 0)} ${var.accelerator_type}, not ${var.gpus_per_machine}. Leave gpus_per_machine away, or choose among ${lookup(local.machine_types_of_gpu, var.accelerator_type, "")}."
  }
  validation {
    condition = (
      !var.use_gpu || var.gpus_per_machine == 0 || !contains(keys(local.attachable_gpus), var.accelerator_type) ||
      contains(keys(lookup(local.attachable_gpus, var.accelerator_type, {})), tostring(var.gpus_per_machine))
    )
    error_message = "A machine can have ${join(" or ", keys(lookup(local.attachable_gpus, var.accelerator_type, {})))} ${var.accelerator_type}, not ${var.gpus_per_machine}."
  }
  validation {
    condition = (
      !var.use_gpu ||
      try(tonumber(regex("^n1-[a-z]+-([0-9]+)", var.gpu_machine_type)[0]) <= local.attachable_gpus[var.accelerator_type][tostring(max(1, var.gpus_per_machine))], true)
    )
    error_message = "${var.gpu_machine_type} has too many vCPUs for ${max(1, var.gpus_per_machine)} ${var.accelerator_type}: at most ${try(local.attachable_gpus[var.accelerator_type][tostring(max(1, var.gpus_per_machine))], 0)}. Take a smaller machine or more GPUs."
  }
}

# --- SSH -----------------------------------------------------------------------------------------

variable "ssh_user" {
  type        = string
  default     = "drivetrain"
  description = "Name of the user on the machines, who may use sudo and Docker."

  validation {
    condition     = can(regex("^[a-z_][a-z0-9_-]{0,30}$", var.ssh_user)) && var.ssh_user != "root"
    error_message = "ssh_user must be the name of a Linux user other than root: lower-case letters, digits, _ and -."
  }
}

variable "ssh_public_key" {
  type        = string
  default     = ""
  description = "The public key with which this user logs in (the content of ~/.ssh/id_ed25519.pub). Empty: only gcloud compute ssh works."

  validation {
    condition     = var.ssh_public_key == "" || can(regex("^(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(256|384|521)|sk-ssh-ed25519@openssh.com|sk-ecdsa-sha2-nistp256@openssh.com) [A-Za-z0-9+/]+={0,3}( [^\\n\\r]*)?$", trimspace(var.ssh_public_key)))
    error_message = "ssh_public_key must be one line with a public key, such as the content of ~/.ssh/id_ed25519.pub."
  }
}

variable "ssh_source_ranges" {
  type        = list(string)
  default     = ["35.235.240.0/20"]
  description = "Addresses that may reach port 22, the only open one; the machines take keys, no passwords. The default is Google's Identity-Aware Proxy (gcloud compute ssh --tunnel-through-iap); for ssh itself: [\"YOUR.OWN.ADDRESS/32\"]"

  validation {
    condition     = alltrue([for range in var.ssh_source_ranges : can(cidrhost(range, 0))])
    error_message = "ssh_source_ranges must be ranges of addresses, such as 203.0.113.7/32."
  }
}

# --- limits to time and money --------------------------------------------------------------------

variable "spot" {
  type        = bool
  default     = false
  description = "Spot machines: cheaper, and Google may take them back at any time, 30 s after a notice."
}

variable "preemptible" {
  type        = bool
  default     = false
  description = "The same as spot."
}

variable "max_run_minutes" {
  type        = number
  default     = 0
  description = "Google stops each machine so many minutes after its start. 0: no limit."

  validation {
    condition     = var.max_run_minutes >= 0 && var.max_run_minutes <= 172800 && floor(var.max_run_minutes) == var.max_run_minutes
    error_message = "max_run_minutes must be a whole number from 0 to 172800 (120 days)."
  }
}

variable "idle_minutes" {
  type        = number
  default     = 60
  description = "A machine shuts itself down after so many minutes without a drivetrain process, an SSH connection or load. 0: never."

  validation {
    condition     = var.idle_minutes >= 0 && floor(var.idle_minutes) == var.idle_minutes && (var.idle_minutes == 0 || var.idle_minutes >= 5)
    error_message = "idle_minutes must be 0 (never) or a whole number from 5 up: preparing a machine can need some minutes without load."
  }
}

variable "billing_account" {
  type        = string
  default     = ""
  description = "The billing account of the budget: gcloud billing accounts list"

  validation {
    condition     = var.billing_account == "" || can(regex("^[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}$", var.billing_account))
    error_message = "billing_account must have the form 012345-6789AB-CDEF01."
  }
}

variable "budget_amount" {
  type        = number
  default     = 0
  description = "Monthly budget of this deployment in the currency of the billing account. Google sends e-mails at 50, 90 and 100 %; it stops nothing. 0: none."

  validation {
    condition     = var.budget_amount >= 0 && (var.budget_amount == 0 || var.billing_account != "")
    error_message = "budget_amount must not be negative, and needs billing_account."
  }
}

variable "run_retention_days" {
  type        = number
  default     = 0
  description = "Objects below runs/ in the bucket are deleted after so many days. 0: never."

  validation {
    condition     = var.run_retention_days >= 0 && floor(var.run_retention_days) == var.run_retention_days
    error_message = "run_retention_days must be a whole number."
  }
}
