# Installs the agent on existing VMs, like the Bicep files in deploy/azure/fleet. Azure Policy installs a VM Application
# on VMs and scale sets, ring by ring. The commands and the policy rules are read from deploy/azure/fleet. For
# instructions, see docs/operate/fleet.md
terraform {
  required_version = ">= 1.11" # the first version that keeps sensitive_body out of the state
  required_providers {
    azapi = {
      source  = "Azure/azapi"
      version = ">= 2.0, < 3.0"
    }
  }
}
