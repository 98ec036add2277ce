# Defines the body of each resource without using a provider. The tests evaluate this file without Azure, and compare
# the result with the Bicep files.
locals {
  files = "${path.module}/../../azure/fleet"

  scope          = "/subscriptions/${var.subscription_id}"
  gallery_id     = "${var.resource_group_id}/providers/Microsoft.Compute/galleries/${var.gallery_name}"
  application_id = "${local.gallery_id}/applications/scheduled-events-bridge"
  identity_id    = "${var.resource_group_id}/providers/Microsoft.ManagedIdentity/userAssignedIdentities/${var.gallery_name}-rollout"
  initiative_id  = "${local.scope}/providers/Microsoft.Authorization/policySetDefinitions/scheduled-events-bridge"

  # The roles Reader and Virtual Machine Contributor, which have the same ID in every tenant.
  reader_role      = "/providers/Microsoft.Authorization/roleDefinitions/acdd72a7-3385-48ef-bd42-f606fba81ae7"
  contributor_role = "/providers/Microsoft.Authorization/roleDefinitions/9980e02c-c2be-4d73-94e8-173b1dc7cf3c"

  commands   = jsondecode(file("${local.files}/commands.json"))
  parameters = jsondecode(file("${local.files}/parameters.json"))
  passed_on  = jsondecode(file("${local.files}/passed-on.json"))

  gallery = {
    properties = {
      description = "Scheduled Events Bridge"
    }
  }

  application = {
    properties = {
      supportedOSType = "Linux"
      description     = "Forwards and approves the scheduled events of a VM."
    }
  }

  # main.tf adds the URLs of the files, which are secret.
  application_version = {
    properties = {
      publishingProfile = {
        manageActions = {
          install = local.commands.install
          update  = local.commands.update # without this command, Azure would remove the running version before the installation
          remove  = local.commands.remove
        }
        settings = {
          packageFileName           = "scheduled-events-bridge.tar"
          configFileName            = "config.toml"
          scriptBehaviorAfterReboot = "Rerun"
        }
        targetRegions = [for region in length(var.regions) > 0 ? var.regions : [var.location] : {
          name                 = region
          regionalReplicaCount = var.replicas
          storageAccountType   = "Standard_LRS"
        }]
      }
      safetyProfile = {
        allowDeletionOfReplicatedLocations = true
      }
    }
  }

  definitions = {
    virtualMachines = {
      name = "scheduled-events-bridge-virtual-machines"
      body = {
        properties = {
          displayName = "Scheduled Events Bridge on Linux VMs"
          description = "VMs of a ring, including those of Flexible scale sets, have the ring's version of the application."
          policyType  = "Custom"
          mode        = "Indexed"
          metadata    = { category = "Compute" }
          parameters  = local.parameters
          policyRule  = jsondecode(file("${local.files}/virtual-machines.json"))
        }
      }
    }
    scaleSets = {
      name = "scheduled-events-bridge-scale-sets"
      body = {
        properties = {
          displayName = "Scheduled Events Bridge in the model of Linux scale sets"
          description = "Scale sets of a ring, Uniform and Flexible, have the ring's version in their model."
          policyType  = "Custom"
          mode        = "Indexed"
          metadata    = { category = "Compute" }
          parameters  = local.parameters
          policyRule  = jsondecode(file("${local.files}/scale-sets.json"))
        }
      }
    }
  }

  initiative = {
    properties = {
      displayName = "Scheduled Events Bridge"
      description = "The agent on VMs and scale sets of one ring."
      policyType  = "Custom"
      metadata    = { category = "Compute" }
      parameters  = local.parameters
      policyDefinitions = [for reference in ["virtualMachines", "scaleSets"] : {
        policyDefinitionReferenceId = reference
        policyDefinitionId          = "${local.scope}/providers/Microsoft.Authorization/policyDefinitions/${local.definitions[reference].name}"
        parameters                  = local.passed_on
      }]
    }
  }

  assignments = { for ring in var.rings : ring.name => {
    properties = {
      displayName        = "Scheduled Events Bridge, ring ${ring.name}"
      policyDefinitionId = local.initiative_id
      enforcementMode    = "Default"
      notScopes          = var.not_scopes
      parameters = {
        effect                = { value = var.effect }
        versionId             = { value = "${local.application_id}/versions/${ring.version}" }
        tagName               = { value = var.tag_name }
        ring                  = { value = ring.name }
        resourceGroups        = { value = ring.resource_groups }
        everythingElse        = { value = ring.everything_else }
        resourceGroupsOfRings = { value = flatten(var.rings[*].resource_groups) }
      }
    }
  } }

  # The name contains the version, so a new version of a ring creates a new task.
  remediations = { for task in flatten([for ring in var.rings : [
    for reference, definition in local.definitions : {
      name = "scheduled-events-bridge-${ring.name}-${trimprefix(definition.name, "scheduled-events-bridge-")}-${replace(ring.version, ".", "-")}"
      ring = ring.name
      body = {
        properties = {
          policyAssignmentId          = "${local.scope}/providers/Microsoft.Authorization/policyAssignments/bridge-${ring.name}"
          policyDefinitionReferenceId = reference
          resourceDiscoveryMode       = "ReEvaluateCompliance"
          resourceCount               = 50000
          parallelDeployments         = var.parallel_deployments
          failureThreshold            = { percentage = var.failure_threshold }
        }
      }
    }
  ]]) : task.name => task if var.remediate }
}
