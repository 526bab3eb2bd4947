# A network of its own: the default network is open for SSH from everywhere, and some organisations have none.

resource "google_compute_network" "machines" {
  count = var.enable_gcp_backend ? 1 : 0

  name                    = "dt-network${local.suffix}"
  description             = local.note
  auto_create_subnetworks = false

  depends_on = [google_project_service.api]
}

resource "google_compute_subnetwork" "machines" {
  count = var.enable_gcp_backend ? 1 : 0

  name                     = "dt-subnet${local.suffix}"
  description              = local.note
  region                   = var.region
  network                  = google_compute_network.machines[0].id
  ip_cidr_range            = "10.128.0.0/20"
  private_ip_google_access = true
}

# NCCL and gloo listen on ports that they choose at random, so all are open between the machines of this deployment.
resource "google_compute_firewall" "between_machines" {
  count = var.enable_gcp_backend ? 1 : 0

  name                    = "dt-between-machines${local.suffix}"
  description             = local.note
  network                 = google_compute_network.machines[0].id
  direction               = "INGRESS"
  source_service_accounts = [google_service_account.machine[0].email]
  target_service_accounts = [google_service_account.machine[0].email]

  allow {
    protocol = "tcp"
  }
  allow {
    protocol = "udp"
  }
  allow {
    protocol = "icmp"
  }
}

resource "google_compute_firewall" "ssh" {
  count = var.enable_gcp_backend && length(var.ssh_source_ranges) > 0 ? 1 : 0

  name                    = "dt-ssh${local.suffix}"
  description             = local.note
  network                 = google_compute_network.machines[0].id
  direction               = "INGRESS"
  source_ranges           = var.ssh_source_ranges
  target_service_accounts = [google_service_account.machine[0].email]

  allow {
    protocol = "tcp"
    ports    = ["22"]
  }
}
