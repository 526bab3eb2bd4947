# Which GPU goes with which machine type, and where it is.

locals {
  # The zones of each GPU. Source: SkyPilot's catalog of Google's own list, github.com/skypilot-org/skypilot-catalog,
  # catalogs/v8/gcp/vms.csv at commit 006059e, read on 2026-11-19. Newer: gcloud compute accelerator-types list
  gpu_zones = {
    "nvidia-tesla-t4" = [
      "asia-east1-a", "asia-east1-c", "asia-east2-a", "asia-east2-c", "asia-northeast1-a", "asia-northeast1-c",
      "asia-northeast3-b", "asia-northeast3-c", "asia-south1-a", "asia-south1-b", "asia-southeast1-a", "asia-southeast1-b",
      "asia-southeast1-c", "asia-southeast2-a", "asia-southeast2-b", "australia-southeast1-a", "australia-southeast1-c",
      "europe-central2-b", "europe-central2-c", "europe-west1-b", "europe-west1-c", "europe-west1-d", "europe-west2-a",
      "europe-west2-b", "europe-west3-b", "europe-west4-a", "europe-west4-b", "europe-west4-c", "me-west1-b", "me-west1-c",
      "northamerica-northeast1-c", "southamerica-east1-a", "southamerica-east1-b", "southamerica-east1-c", "us-central1-a",
      "us-central1-b", "us-central1-c", "us-central1-f", "us-east1-b", "us-east1-c", "us-east1-d", "us-east4-a", "us-east4-b",
      "us-east4-c", "us-west1-a", "us-west1-b", "us-west2-b", "us-west2-c", "us-west3-b", "us-west4-a", "us-west4-b",
    ]
    "nvidia-tesla-v100" = [
      "asia-east1-c", "europe-west4-a", "europe-west4-b", "europe-west4-c", "us-central1-a", "us-central1-b", "us-central1-c",
      "us-central1-f", "us-east1-b", "us-east1-c", "us-west1-a", "us-west1-b",
    ]
    "nvidia-tesla-p100" = [
      "asia-east1-a", "asia-east1-c", "australia-southeast1-b", "europe-west1-b", "europe-west1-d", "europe-west4-a",
      "us-central1-c", "us-central1-f", "us-east1-b", "us-east1-c", "us-west1-a", "us-west1-b",
    ]
    "nvidia-tesla-p4" = [
      "asia-southeast1-a", "asia-southeast1-b", "asia-southeast1-c", "australia-southeast1-a", "australia-southeast1-b",
      "europe-west4-b", "europe-west4-c", "northamerica-northeast1-a", "northamerica-northeast1-b", "northamerica-northeast1-c",
      "us-central1-a", "us-central1-c", "us-east4-a", "us-east4-b", "us-east4-c", "us-west2-b", "us-west2-c",
    ]
    "nvidia-l4" = [
      "asia-east1-a", "asia-east1-b", "asia-east1-c", "asia-northeast1-a", "asia-northeast1-b", "asia-northeast1-c",
      "asia-northeast3-a", "asia-northeast3-b", "asia-south1-a", "asia-south1-b", "asia-south1-c", "asia-southeast1-a",
      "asia-southeast1-b", "asia-southeast1-c", "europe-west1-b", "europe-west1-c", "europe-west2-a", "europe-west2-b",
      "europe-west3-a", "europe-west3-b", "europe-west4-a", "europe-west4-b", "europe-west4-c", "europe-west6-b", "europe-west6-c",
      "me-central2-a", "me-central2-c", "northamerica-northeast1-b", "northamerica-northeast1-c", "northamerica-northeast2-a",
      "northamerica-northeast2-b", "us-central1-a", "us-central1-b", "us-central1-c", "us-east1-b", "us-east1-c", "us-east1-d",
      "us-east4-a", "us-east4-c", "us-west1-a", "us-west1-b", "us-west1-c", "us-west4-a", "us-west4-c",
    ]
    "nvidia-tesla-a100" = [
      "asia-northeast1-a", "asia-northeast1-c", "asia-northeast3-a", "asia-northeast3-b", "asia-southeast1-a", "asia-southeast1-b",
      "asia-southeast1-c", "europe-west4-a", "europe-west4-b", "me-west1-a", "me-west1-c", "us-central1-a", "us-central1-b",
      "us-central1-c", "us-central1-f", "us-east1-b", "us-west1-b", "us-west3-b", "us-west4-b",
    ]
    "nvidia-a100-80gb" = [
      "asia-southeast1-c", "europe-west4-a", "us-central1-a", "us-central1-c", "us-east4-c", "us-east5-a", "us-east5-b",
    ]
  }

  # GPUs that an n1 machine can take: number of GPUs -> most vCPUs of the machine.
  attachable_gpus = {
    "nvidia-tesla-t4"   = { "1" = 48, "2" = 48, "4" = 96 }
    "nvidia-tesla-v100" = { "1" = 12, "2" = 24, "4" = 48, "8" = 96 }
    "nvidia-tesla-p100" = { "1" = 16, "2" = 32, "4" = 64 }
    "nvidia-tesla-p4"   = { "1" = 24, "2" = 48, "4" = 96 }
  }

  # Machine types that come with their GPUs: GPU -> machine type -> number of GPUs.
  built_in_gpus = {
    "nvidia-l4" = {
      "g2-standard-4"  = 1, "g2-standard-8" = 1, "g2-standard-12" = 1, "g2-standard-16" = 1, "g2-standard-24" = 2,
      "g2-standard-32" = 1, "g2-standard-48" = 4, "g2-standard-96" = 8,
    }
    "nvidia-tesla-a100" = { "a2-highgpu-1g" = 1, "a2-highgpu-2g" = 2, "a2-highgpu-4g" = 4, "a2-highgpu-8g" = 8, "a2-megagpu-16g" = 16 }
    "nvidia-a100-80gb"  = { "a2-ultragpu-1g" = 1, "a2-ultragpu-2g" = 2, "a2-ultragpu-4g" = 4, "a2-ultragpu-8g" = 8 }
  }

  # What gpu_machine_type may be, for messages.
  machine_types_of_gpu = merge(
    { for gpu, _ in local.attachable_gpus : gpu => "n1-standard-N, n1-highmem-N or n1-highcpu-N" },
    { for gpu, types in local.built_in_gpus : gpu => join(", ", [for type, count in types : "${type} (${count})"]) },
  )
}
