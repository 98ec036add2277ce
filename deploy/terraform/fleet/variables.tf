variable "subscription_id" {
  description = "The subscription of the VMs."
  type        = string
}

variable "resource_group_id" {
  description = "Resource id of the group of the gallery; it exists already."
  type        = string
}

variable "location" {
  description = "Where the gallery is made, and where Azure keeps the assignments."
  type        = string
}

variable "tags" {
  description = "Tags of everything that is made."
  type        = map(string)
  default     = {}
}

variable "gallery_name" {
  description = "The gallery. Azure takes letters, digits, dots and underscores."
  type        = string
  default     = "scheduled_events_bridge"
}

variable "versions" {
  description = "Where Azure fetches package and configuration from, by versions as 1.2.3; they stay as long as a VM names them."
  type = map(object({
    package_url = string
    config_url  = optional(string, "")
  }))
  sensitive = true
}

variable "regions" {
  description = "The regions of the VMs; the gallery's own must be one of them. Empty: that one alone."
  type        = list(string)
  default     = []
}

variable "replicas" {
  description = "Copies in each region. VMs fetch from these, many at a time."
  type        = number
  default     = 3
  validation {
    condition     = var.replicas >= 1 && var.replicas <= 10
    error_message = "Azure makes 1 to 10 copies in a region."
  }
}

variable "rings" {
  description = "The rings so far, in order. Only the last has everything_else = true."
  type = list(object({
    name            = string
    version         = string
    resource_groups = optional(list(string), [])
    everything_else = optional(bool, false)
  }))
  validation {
    condition     = length([for ring in var.rings : ring if ring.everything_else]) <= 1
    error_message = "Two rings with everything_else would give the same VM two versions."
  }
}

variable "tag_name" {
  description = "The tag that names the ring of a VM or scale set. A value that names no ring, such as none, excludes it."
  type        = string
  default     = "scheduled-events-bridge"
}

variable "not_scopes" {
  description = "Resource ids of resource groups that get nothing, such as those that another service manages."
  type        = list(string)
  default     = []
}

variable "effect" {
  description = "AuditIfNotExists counts who lacks the agent, and changes nothing."
  type        = string
  default     = "DeployIfNotExists"
  validation {
    condition     = contains(["DeployIfNotExists", "AuditIfNotExists", "Disabled"], var.effect)
    error_message = "There are DeployIfNotExists, AuditIfNotExists and Disabled."
  }
}

variable "remediate" {
  description = "Whether VMs that exist already get the version of their ring; without, only new ones do."
  type        = bool
  default     = true
}

variable "parallel_deployments" {
  description = "How many VMs of a ring, and how many scale sets, at the same time."
  type        = number
  default     = 10
}

variable "failure_threshold" {
  description = "Which part of a ring may fail before Azure stops its task: 0.05 is a twentieth."
  type        = number
  default     = 0.05
}
