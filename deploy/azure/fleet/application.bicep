// Publishes the agent as a VM Application. The file creates a gallery, the application, one version of the application,
// and the identity with which Azure Policy installs the application on VMs (policy.bicep). Deploy this file again for
// each new version. It does not remove previous versions. For instructions, see docs/operate/fleet.md
targetScope = 'resourceGroup'

@description('The region of the gallery.')
param location string = resourceGroup().location

@description('The tags of all created resources.')
param tags object = {}

@description('The name of the gallery: letters, digits, periods, and underscores.')
param galleryName string = 'scheduled_events_bridge'

@description('The version of the application, such as 1.2.3. Increase it for each new archive and each new configuration.')
param version string

@description('The URL of the package: a block blob, with a SAS (sas.sh) unless the blob is public.')
@secure()
param packageUrl string

@description('The URL of config.toml, with a SAS. Empty: each VM keeps its current configuration.')
@secure()
param configUrl string = ''

@description('The regions of the VMs, including the region of the gallery.')
param regions array = [location]

@description('The number of copies in each region. Many VMs download from these copies at the same time.')
@minValue(1)
@maxValue(10)
param replicas int = 3

// The role Reader, which has the same ID in every tenant. To set a version on a VM, the identity must be able to read
// it.
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
    description: 'Forwards and approves the scheduled events of a VM.'
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
      // Azure runs these commands with Bash as root, in a directory that contains the package and the configuration.
      manageActions: {
        install: commands.install
        update: commands.update // without this command, Azure would remove the running version before the installation
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
