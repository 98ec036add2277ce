output "application_id" {
  description = "The application; its versions are below it."
  value       = local.application_id
}

output "identity_principal_id" {
  description = "The identity by which Azure Policy changes the VMs."
  value       = azapi_resource.identity.output.properties.principalId
}
