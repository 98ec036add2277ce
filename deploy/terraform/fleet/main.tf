resource "azapi_resource" "gallery" {
  type      = "Microsoft.Compute/galleries@2024-03-03"
  parent_id = var.resource_group_id
  name      = var.gallery_name
  location  = var.location
  tags      = var.tags
  body      = local.gallery
}

resource "azapi_resource" "application" {
  type      = "Microsoft.Compute/galleries/applications@2024-03-03"
  parent_id = azapi_resource.gallery.id
  name      = "scheduled-events-bridge"
  location  = var.location
  tags      = var.tags
  body      = local.application
}

resource "azapi_resource" "version" {
  for_each = nonsensitive(toset(keys(var.versions)))

  type      = "Microsoft.Compute/galleries/applications/versions@2024-03-03"
  parent_id = azapi_resource.application.id
  name      = each.key
  location  = var.location
  tags      = var.tags
  body      = local.application_version
  # The Terraform state never contains a sensitive_body.
  sensitive_body = {
    properties = {
      publishingProfile = {
        source = merge(
          { mediaLink = var.versions[each.key].package_url },
          var.versions[each.key].config_url == "" ? {} : { defaultConfigurationLink = var.versions[each.key].config_url },
        )
      }
    }
  }
}

resource "azapi_resource" "identity" {
  type                   = "Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31"
  parent_id              = var.resource_group_id
  name                   = "${var.gallery_name}-rollout"
  location               = var.location
  tags                   = var.tags
  response_export_values = ["properties.principalId"]
}

resource "azapi_resource" "reader" {
  type      = "Microsoft.Authorization/roleAssignments@2022-04-01"
  parent_id = azapi_resource.gallery.id
  name      = uuidv5("url", "${local.gallery_id}${local.identity_id}${local.reader_role}")
  body = {
    properties = {
      roleDefinitionId = "${local.scope}${local.reader_role}"
      principalId      = azapi_resource.identity.output.properties.principalId
      principalType    = "ServicePrincipal"
    }
  }
}

resource "azapi_resource" "contributor" {
  type      = "Microsoft.Authorization/roleAssignments@2022-04-01"
  parent_id = local.scope
  name      = uuidv5("url", "${local.scope}${local.identity_id}${local.contributor_role}")
  body = {
    properties = {
      roleDefinitionId = "${local.scope}${local.contributor_role}"
      principalId      = azapi_resource.identity.output.properties.principalId
      principalType    = "ServicePrincipal"
    }
  }
}

resource "azapi_resource" "definition" {
  for_each = local.definitions

  type      = "Microsoft.Authorization/policyDefinitions@2023-04-01"
  parent_id = local.scope
  name      = each.value.name
  body      = each.value.body
}

resource "azapi_resource" "initiative" {
  type       = "Microsoft.Authorization/policySetDefinitions@2023-04-01"
  parent_id  = local.scope
  name       = "scheduled-events-bridge"
  body       = local.initiative
  depends_on = [azapi_resource.definition]
}

resource "azapi_resource" "assignment" {
  for_each = local.assignments

  type      = "Microsoft.Authorization/policyAssignments@2023-04-01"
  parent_id = local.scope
  name      = "bridge-${each.key}" # the name in policy.bicep
  location  = var.location
  body      = each.value
  identity {
    type         = "UserAssigned"
    identity_ids = [local.identity_id]
  }
  depends_on = [azapi_resource.initiative, azapi_resource.identity, azapi_resource.version]
}

resource "azapi_resource" "remediation" {
  for_each = local.remediations

  type       = "Microsoft.PolicyInsights/remediations@2021-10-01"
  parent_id  = local.scope
  name       = each.key
  body       = each.value.body
  depends_on = [azapi_resource.assignment, azapi_resource.reader, azapi_resource.contributor]
}
