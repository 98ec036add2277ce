// The agent as a VM Application: a gallery, the application, one version of it, and the identity by which Azure Policy
// gives it to VMs (policy.bicep). Publish each new version with this; those before stay. Use: docs/operate/fleet.md
targetScope = 'resourceGroup'

@description('Where the gallery is made.')
param location string = resourceGroup().location

@description('Tags of everything that is made.')
param tags object = {}

@description('The gallery. Azure takes letters, digits, dots and underscores.')
param galleryName string = 'scheduled_events_bridge'

@description('Version of the application, as 1.2.3. Count it up for each new archive, and for each new configuration.')
param version string

@description('The URL of the package: a block blob, with a SAS (sas.sh) unless the blob is public.')
@secure()
param packageUrl string

@description('The URL of config.toml, with a SAS. Empty: each VM keeps its current configuration.')
@secure()
param configUrl string = ''

@description('The regions of the VMs; the gallery\'s own must be one of them.')
param regions array = [location]

@description('Copies in each region. VMs fetch from these, many at a time.')
@minValue(1)
@maxValue(10)
param replicas int = 3

// Reader, the same in every tenant: to set a version on a VM, one must be able to read it.
var readerRoleId = 'acdd72a7-3385-48ef-bd42-f606fba81ae7'
var commands = loadJsonContent('commands.json')
var targetRegions = [
  for region in regions: {
    name: region
    regionalReplicaCount: replicas
    storageAccountType: 'Standard_LRS'
  }
]

resource gallery 'Microsoft.Compute/galleries@2024-03-03' = {
  name: galleryName
  location: location
  tags: tags
  properties: {
    description: 'Scheduled Events Bridge'
  }
}

resource application 'Microsoft.Compute/galleries/applications@2024-03-03' = {
  parent: gallery
  name: 'scheduled-events-bridge'
  location: location
  tags: tags
  properties: {
    supportedOSType: 'Linux'
    description: 'Forwards the Scheduled Events of a VM, and approves them.'
  }
}

resource applicationVersion 'Microsoft.Compute/galleries/applications/versions@2024-03-03' = {
  parent: application
  name: version
  location: location
  tags: tags
  properties: {
    publishingProfile: {
      source: {
        mediaLink: packageUrl
        defaultConfigurationLink: empty(configUrl) ? null : configUrl
      }
      // Bash, as root, in a directory of this version that holds the package and the configuration under these names.
      manageActions: {
        install: commands.install
        update: commands.update // without one, Azure would remove the version that runs and then install
        remove: commands.remove
      }
      settings: {
        packageFileName: 'scheduled-events-bridge.tar'
        configFileName: 'config.toml'
        scriptBehaviorAfterReboot: 'Rerun'
      }
      targetRegions: targetRegions
    }
    safetyProfile: {
      allowDeletionOfReplicatedLocations: true
    }
  }
}

resource identity 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' = {
  name: '${galleryName}-rollout'
  location: location
  tags: tags
}

resource reader 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  scope: gallery
  name: guid(gallery.id, identity.id, readerRoleId)
  properties: {
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', readerRoleId)
    principalId: identity.properties.principalId
    principalType: 'ServicePrincipal'
  }
}

output applicationId string = application.id
output identityId string = identity.id
output identityPrincipalId string = identity.properties.principalId
