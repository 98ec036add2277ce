// Installs the agent on the Linux VMs of one subscription, ring by ring, with Azure Policy (deployIfNotExists). Azure
// Policy covers new VMs automatically, and remediation.bicep covers existing VMs. For instructions, see
// docs/operate/fleet.md
targetScope = 'subscription'

@description('The region in which Azure stores the assignments.')
param location string = deployment().location

@description('Output applicationId of application.bicep.')
param applicationId string

@description('Output identityId of application.bicep.')
param identityId string

@description('Output identityPrincipalId of application.bicep.')
param identityPrincipalId string

@description('The rings, each {name, version, resourceGroups: [...], everythingElse: true only for the last ring}.')
param rings array

@description('The tag with the ring of a VM or scale set. A value that is not a ring, such as none, excludes the VM.')
param tagName string = 'scheduled-events-bridge'

@description('Resource IDs of excluded subscriptions and resource groups, such as those that another service manages.')
param notScopes array = []

@description('AuditIfNotExists counts the VMs without the agent, and changes nothing.')
@allowed(['DeployIfNotExists', 'AuditIfNotExists', 'Disabled'])
param effect string = 'DeployIfNotExists'

// The role Virtual Machine Contributor, which has the same ID in every tenant. Both rules contain this ID.
var contributorRoleId = '9980e02c-c2be-4d73-94e8-173b1dc7cf3c'
var parameters = loadJsonContent('parameters.json')
var passedOn = loadJsonContent('passed-on.json')
var resourceGroupsOfRings = flatten(map(rings, ring => ring.resourceGroups))

resource virtualMachines 'Microsoft.Authorization/policyDefinitions@2023-04-01' = {
  name: 'scheduled-events-bridge-virtual-machines'
  properties: {
    displayName: 'Scheduled Events Bridge on Linux VMs'
    description: 'VMs of a ring, including those of Flexible scale sets, have the ring\'s version of the application.'
    policyType: 'Custom'
    mode: 'Indexed'
    metadata: {
      category: 'Compute'
    }
    parameters: parameters
    policyRule: loadJsonContent('virtual-machines.json')
  }
}

resource scaleSets 'Microsoft.Authorization/policyDefinitions@2023-04-01' = {
  name: 'scheduled-events-bridge-scale-sets'
  properties: {
    displayName: 'Scheduled Events Bridge in the model of Linux scale sets'
    description: 'Scale sets of a ring, Uniform and Flexible, have the ring\'s version in their model.'
    policyType: 'Custom'
    mode: 'Indexed'
    metadata: {
      category: 'Compute'
    }
    parameters: parameters
    policyRule: loadJsonContent('scale-sets.json')
  }
}

resource initiative 'Microsoft.Authorization/policySetDefinitions@2023-04-01' = {
  name: 'scheduled-events-bridge'
  properties: {
    displayName: 'Scheduled Events Bridge'
    description: 'The agent on VMs and scale sets of one ring.'
    policyType: 'Custom'
    metadata: {
      category: 'Compute'
    }
    parameters: parameters
    policyDefinitions: [
      {
        policyDefinitionReferenceId: 'virtualMachines'
        policyDefinitionId: virtualMachines.id
        parameters: passedOn
      }
      {
        policyDefinitionReferenceId: 'scaleSets'
        policyDefinitionId: scaleSets.id
        parameters: passedOn
      }
    ]
  }
}

resource contributor 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(subscription().id, identityPrincipalId, contributorRoleId)
  properties: {
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', contributorRoleId)
    principalId: identityPrincipalId
    principalType: 'ServicePrincipal'
  }
}

resource assignments 'Microsoft.Authorization/policyAssignments@2023-04-01' = [
  for ring in rings: {
    name: 'bridge-${ring.name}' // at most 24 characters at the scope of a management group
    location: location
    identity: {
      type: 'UserAssigned'
      userAssignedIdentities: {
        '${identityId}': {}
      }
    }
    properties: {
      displayName: 'Scheduled Events Bridge, ring ${ring.name}'
      policyDefinitionId: initiative.id
      enforcementMode: 'Default'
      notScopes: notScopes
      parameters: {
        effect: {
          value: effect
        }
        versionId: {
          value: '${applicationId}/versions/${ring.version}'
        }
        tagName: {
          value: tagName
        }
        ring: {
          value: ring.name
        }
        resourceGroups: {
          value: ring.resourceGroups
        }
        everythingElse: {
          value: ring.everythingElse
        }
        resourceGroupsOfRings: {
          value: resourceGroupsOfRings
        }
      }
    }
  }
]
