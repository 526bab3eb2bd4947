# The state is in a bucket: terraform init -backend-config=backend.tfvars
# Without this file, the state is in this folder.
terraform {
  backend "gcs" {}
}
