output "application_id" {
  description = "The resource ID of the application. The IDs of its versions start with this ID."
  value       = local.application_id
}

output "identity_principal_id" {
  description = "The principal ID of the identity that Azure Policy uses to change the VMs."
  value       = azapi_resource.identity.output.properties.principalId
}
