# The agent on VMs that exist already, as deploy/azure/fleet does it in Bicep: a VM Application, and Azure Policy that
# gives it to VMs and scale sets, ring by ring. The commands and the rules are the very files of that directory.
# Use: docs/operate/fleet.md
terraform {
  required_version = ">= 1.11" # the first that keeps sensitive_body out of the state
  required_providers {
    azapi = {
      source  = "Azure/azapi"
      version = ">= 2.0, < 3.0"
    }
  }
}
