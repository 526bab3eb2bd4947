# terraform test: what is refused before anything is created. tests/system/test_terraform.py checks the messages.

mock_provider "google" {}

variables {
  project_id = "my-project"
}

run "l4_on_n1" {
  command = plan
  variables {
    accelerator_type = "nvidia-l4"
  }
  expect_failures = [var.gpu_machine_type]
}

run "t4_on_g2" {
  command = plan
  variables {
    gpu_machine_type = "g2-standard-4"
  }
  expect_failures = [var.gpu_machine_type]
}

run "a100_80gb_on_a2_highgpu" {
  command = plan
  variables {
    accelerator_type = "nvidia-a100-80gb"
    gpu_machine_type = "a2-highgpu-1g"
  }
  expect_failures = [var.gpu_machine_type]
}

run "unknown_gpu" {
  command = plan
  variables {
    accelerator_type = "nvidia-rtx-4090"
  }
  expect_failures = [var.accelerator_type]
}

run "two_l4_in_g2_standard_48" {
  command = plan
  variables {
    accelerator_type = "nvidia-l4"
    gpu_machine_type = "g2-standard-48"
    gpus_per_machine = 2
  }
  expect_failures = [var.gpus_per_machine]
}

run "three_t4" {
  command = plan
  variables {
    gpus_per_machine = 3
  }
  expect_failures = [var.gpus_per_machine]
}

run "one_v100_with_32_vcpus" {
  command = plan
  variables {
    accelerator_type = "nvidia-tesla-v100"
    gpu_machine_type = "n1-standard-32"
  }
  expect_failures = [var.gpus_per_machine]
}

run "zone_without_the_gpu" {
  command = plan
  variables {
    zone = "us-central1-d"
  }
  expect_failures = [var.zone]
}

run "zones_without_the_gpu" {
  command = plan
  variables {
    zones = ["us-central1-a", "us-central1-d"]
  }
  expect_failures = [var.zones]
}

run "master_zone_without_the_gpu" {
  command = plan
  variables {
    master_zone = "us-central1-d"
  }
  expect_failures = [var.master_zone]
}

run "worker_in_another_region" {
  command = plan
  variables {
    worker_zone = "europe-west4-a"
  }
  expect_failures = [var.worker_zone]
}

run "zone_in_another_region" {
  command = plan
  variables {
    zone = "europe-west4-a"
  }
  expect_failures = [var.zone]
}

run "cpu_zone_is_not_checked_for_gpus" {
  command = plan
  variables {
    use_gpu = false
    zone    = "us-central1-d"
  }
}

run "newer_zone" {
  command = plan
  variables {
    zone            = "us-central1-d"
    check_gpu_zones = false
  }
}

run "command_in_user_name" {
  command = plan
  variables {
    ssh_user = "me;reboot"
  }
  expect_failures = [var.ssh_user]
}

run "two_lines_in_key" {
  command = plan
  variables {
    ssh_public_key = "ssh-ed25519 AAAAC3Nza\nroot:ssh-ed25519 AAAAC3Nza"
  }
  expect_failures = [var.ssh_public_key]
}

run "deployment_is_no_label" {
  command = plan
  variables {
    deployment = "Exp 7"
  }
  expect_failures = [var.deployment]
}

run "budget_without_account" {
  command = plan
  variables {
    budget_amount = 5
  }
  expect_failures = [var.budget_amount]
}

run "too_long" {
  command = plan
  variables {
    max_run_minutes = 200000
  }
  expect_failures = [var.max_run_minutes]
}

run "impatient" {
  command = plan
  variables {
    idle_minutes = 1
  }
  expect_failures = [var.idle_minutes]
}
