variable "subscription_id" {
  description = "The ID of the subscription of the VMs."
  type        = string
}

variable "resource_group_id" {
  description = "The resource ID of an existing resource group for the gallery."
  type        = string
}

variable "location" {
  description = "The region of the gallery and of the policy assignments."
  type        = string
}

variable "tags" {
  description = "The tags of all created resources."
  type        = map(string)
  default     = {}
}

variable "gallery_name" {
  description = "The name of the gallery: letters, digits, periods, and underscores."
  type        = string
  default     = "scheduled_events_bridge"
}

variable "versions" {
  description = "The URLs of the package and the configuration for each version, such as 1.2.3. Keep a version while a VM uses it."
  type = map(object({
    package_url = string
    config_url  = optional(string, "")
  }))
  sensitive = true
}

variable "regions" {
  description = "The regions of the VMs, including the region of the gallery. If empty, only the region of the gallery."
  type        = list(string)
  default     = []
}

variable "replicas" {
  description = "The number of copies in each region. Many VMs download from these copies at the same time."
  type        = number
  default     = 3
  validation {
    condition     = var.replicas >= 1 && var.replicas <= 10
    error_message = "The number of copies in each region must be from 1 to 10."
  }
}

variable "rings" {
  description = "The rings of the rollout, in order. Only the last ring has everything_else = true."
  type = list(object({
    name            = string
    version         = string
    resource_groups = optional(list(string), [])
    everything_else = optional(bool, false)
  }))
  validation {
    condition     = length([for ring in var.rings : ring if ring.everything_else]) <= 1
    error_message = "Only one ring can have everything_else = true, because a VM can have only one version."
  }
}

variable "tag_name" {
  description = "The tag with the ring of a VM or scale set. A value that is not a ring, such as none, excludes the VM."
  type        = string
  default     = "scheduled-events-bridge"
}

variable "not_scopes" {
  description = "The resource IDs of excluded resource groups, such as those that another service manages."
  type        = list(string)
  default     = []
}

variable "effect" {
  description = "AuditIfNotExists counts the VMs without the agent, and changes nothing."
  type        = string
  default     = "DeployIfNotExists"
  validation {
    condition     = contains(["DeployIfNotExists", "AuditIfNotExists", "Disabled"], var.effect)
    error_message = "The effect must be DeployIfNotExists, AuditIfNotExists, or Disabled."
  }
}

variable "remediate" {
  description = "Whether to install the version of a ring on existing VMs. If false, Azure installs it only on new VMs."
  type        = bool
  default     = true
}

variable "parallel_deployments" {
  description = "The maximum number of VMs, and of scale sets, of a ring that Azure changes at the same time."
  type        = number
  default     = 10
}

variable "failure_threshold" {
  description = "The part of a ring that may fail before Azure stops the task, for example 0.05 for 5 %."
  type        = number
  default     = 0.05
}
