"""Machines of Google Cloud: `up` makes them with Terraform, runs reach them with ssh, `down` removes them.

Knowledge, without actions: settings.py (settings, and the variables that Terraform gets), prices.py with prices.json (what it costs),
machines.py (machines from what gcloud prints), plan.py (what a plan of Terraform would do), failures.py (what failed, and the fix).

Actions: cloud.py is the only file that starts gcloud and terraform; deployment.py keeps Terraform's folder and applies a plan, which takes the
user's consent; startup.py waits until machines can train; up.py joins these; orphans.py finds what a crash left behind;
checks.py is what `doctor` shows; target.py is the target; builds.py finds who builds an image with Cloud Build.
"""
