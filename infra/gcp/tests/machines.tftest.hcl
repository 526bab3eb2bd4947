# terraform test: what is planned for each kind of machine. The provider is a mock: nothing is created.

mock_provider "google" {}

variables {
  project_id     = "my-project"
  ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIExample me@here"
}

run "cpu" {
  command = plan
  variables {
    use_gpu = false
  }

  assert {
    condition     = google_compute_instance.machine["dt-master"].machine_type == "e2-medium" && length(google_compute_instance.machine["dt-master"].guest_accelerator) == 0
    error_message = "a CPU machine is an e2-medium without GPU"
  }
  assert {
    condition     = google_compute_instance.machine["dt-master"].scheduling[0].on_host_maintenance == "MIGRATE"
    error_message = "a CPU machine can be migrated"
  }
  assert {
    condition     = output.gpus_per_machine == 0 && output.machine_type == "e2-medium"
    error_message = "outputs"
  }
}

run "t4_x2" {
  command = plan
  variables {
    gpus_per_machine = 2
    gpu_machine_type = "n1-standard-8"
  }

  assert {
    condition     = keys(google_compute_instance.machine) == ["dt-master", "dt-worker"]
    error_message = "guide 000 names the machines dt-master and dt-worker"
  }
  assert {
    condition     = alltrue([for machine in google_compute_instance.machine : machine.guest_accelerator[0].type == "nvidia-tesla-t4" && machine.guest_accelerator[0].count == 2])
    error_message = "each machine has two T4"
  }
  assert {
    condition     = alltrue([for machine in google_compute_instance.machine : machine.scheduling[0].on_host_maintenance == "TERMINATE" && machine.scheduling[0].provisioning_model == "STANDARD" && machine.scheduling[0].automatic_restart])
    error_message = "machines with GPUs cannot be migrated; without a limit they restart after a fault of the host"
  }
}

run "l4_spot_x4" {
  command = plan
  variables {
    accelerator_type = "nvidia-l4"
    gpu_machine_type = "g2-standard-48"
    num_workers      = 3
    spot             = true
    max_run_minutes  = 90
    deployment       = "exp-7"
  }

  assert {
    condition     = keys(google_compute_instance.machine) == ["dt-master-exp-7", "dt-worker-2-exp-7", "dt-worker-3-exp-7", "dt-worker-exp-7"]
    error_message = "the deployment is a suffix of the names"
  }
  assert {
    condition     = output.machines[*].name == ["dt-master-exp-7", "dt-worker-exp-7", "dt-worker-2-exp-7", "dt-worker-3-exp-7"]
    error_message = "the output has the machines by rank"
  }
  assert {
    condition     = alltrue([for rank, machine in output.machines : google_compute_instance.machine[machine.name].labels["drivetrain-rank"] == tostring(rank)])
    error_message = "each machine has its rank as a label"
  }
  assert {
    condition     = alltrue([for machine in google_compute_instance.machine : length(machine.guest_accelerator) == 0]) && output.gpus_per_machine == 4
    error_message = "a g2-standard-48 comes with its four L4"
  }
  assert {
    condition = alltrue([
      for machine in google_compute_instance.machine : machine.scheduling[0].provisioning_model == "SPOT" && machine.scheduling[0].preemptible &&
      !machine.scheduling[0].automatic_restart && machine.scheduling[0].on_host_maintenance == "TERMINATE" && machine.scheduling[0].instance_termination_action == "STOP"
    ])
    error_message = "spot machines are stopped, not deleted"
  }
  assert {
    condition     = alltrue([for machine in google_compute_instance.machine : machine.scheduling[0].max_run_duration[0].seconds == 5400])
    error_message = "90 minutes"
  }
  assert {
    condition     = alltrue([for machine in google_compute_instance.machine : strcontains(machine.metadata["shutdown-script"], "SAVE_SECONDS=25\n") && strcontains(machine.metadata["startup-script"], "NUM_GPUS=4\n")])
    error_message = "the scripts know the notice of a spot machine and the number of GPUs"
  }
}

run "a100" {
  command = plan
  variables {
    accelerator_type = "nvidia-a100-80gb"
    gpu_machine_type = "a2-ultragpu-2g"
    gpus_per_machine = 2
    num_workers      = 0
  }

  assert {
    condition     = keys(google_compute_instance.machine) == ["dt-master"] && output.worker_ips == [] && output.worker_ip == ""
    error_message = "one machine"
  }
}

run "mixed_zones" {
  command = plan
  variables {
    zones       = ["us-central1-a", "us-central1-b", "us-central1-f"]
    num_workers = 3
  }

  assert {
    condition     = output.machines[*].zone == ["us-central1-a", "us-central1-b", "us-central1-f", "us-central1-a"]
    error_message = "machines are spread over the zones in turn"
  }
}

run "guide_zones" {
  command = plan
  variables {
    master_zone = "us-central1-a"
    worker_zone = "us-central1-f"
    zone        = "us-central1-d" # has no T4, and is not used
  }

  assert {
    condition     = output.machines[*].zone == ["us-central1-a", "us-central1-f"] && output.master_zone == "us-central1-a" && output.worker_zone == "us-central1-f"
    error_message = "guide 000's variables for separate zones"
  }
}

run "without_machines" {
  command = plan
  variables {
    enable_gcp_backend = false
  }

  assert {
    condition     = length(google_compute_instance.machine) == 0 && length(google_compute_network.machines) == 0 && length(google_service_account.machine) == 0
    error_message = "nothing that is paid by the hour"
  }
  assert {
    condition     = output.model_bucket == "my-project-distributed-training" && output.master_ip == "" && output.machines == []
    error_message = "the bucket stays"
  }
}

run "cloud_build_and_budget" {
  command = plan
  variables {
    cloud_build_user = "someone@example.com"
    billing_account  = "012345-6789AB-CDEF01"
    budget_amount    = 20.5
  }

  assert {
    condition     = google_billing_budget.deployment[0].budget_filter[0].labels["drivetrain"] == "default"
    error_message = "the budget counts what has the label"
  }
  assert {
    condition     = google_billing_budget.deployment[0].amount[0].specified_amount[0].units == "20" && google_billing_budget.deployment[0].amount[0].specified_amount[0].nanos == 500000000
    error_message = "20.5"
  }
  assert {
    condition     = google_project_iam_member.build_user["roles/cloudbuild.builds.editor"].member == "user:someone@example.com"
    error_message = "the user may build images"
  }
}

run "created" {
  variables {
    num_workers = 2
  }

  assert {
    condition     = output.master_internal_ip == output.machines[0].internal_ip && output.internal_ips == output.machines[*].internal_ip && length(output.worker_ips) == 2
    error_message = "outputs after apply, with the mock's addresses"
  }
}
