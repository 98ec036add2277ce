// An event hub for a fleet's records, and a scale set whose VMs send theirs to it: the identity, the role, the agent by
// cloud-init, and the two profiles without which Azure does not announce OS upgrades and deletions. Use: README.md
targetScope = 'resourceGroup'

@description('Where everything is made.')
param location string = resourceGroup().location

@description('Tags of everything that is made.')
param tags object = {}

@description('The Event Hubs namespace. Its name is part of a public address, so it must be free in all of Azure.')
param namespaceName string = 'scheduled-events-${uniqueString(resourceGroup().id)}'

@description('The event hub.')
param eventHubName string = 'scheduled-events'

@description('Partitions of the hub. They bound how many readers share the work, and cannot be changed on Standard.')
@minValue(1)
@maxValue(32)
param partitionCount int = 4

@description('How many hours the hub keeps a record. Standard keeps 7 days at most.')
@minValue(1)
@maxValue(168)
param retentionHours int = 168

@description('One consumer group for each system that reads all records.')
param consumerGroups array = ['logging']

@description('Throughput units that are always there. One takes 1 MB or 1,000 records a second.')
@minValue(1)
@maxValue(40)
param throughputUnits int = 1

@description('Throughput units that the namespace may grow to by itself. A fleet speaks all at once.')
@minValue(1)
@maxValue(40)
param maximumThroughputUnits int = 4

@description('The scale set.')
param scaleSetName string = 'bridge'

@description('How many VMs.')
@minValue(0)
@maxValue(1000)
param instanceCount int = 2

@description('Size of the VMs. OS upgrades are announced only on sizes with memory-preserving updates: not G, H, M and N.')
param vmSize string = 'Standard_D2s_v5'

@description('Availability zones, such as ["1", "2", "3"]; empty for none.')
param zones array = []

@description('Resource id of the subnet. Its VMs need the way to the hub (5671, or 443), to the wheel, and to PyPI.')
param subnetId string

@description('The administrator of the VMs.')
param adminUsername string = 'azureuser'

@description('The public SSH key of the administrator.')
param sshPublicKey string

@description('Where the VMs fetch the wheel of the agent from; it must end with the name of the wheel, but for a query.')
param wheelUrl string

@description('SHA-256 of the wheel, in hexadecimal. Nothing else is installed.')
@minLength(64)
@maxLength(64)
param wheelSha256 string

@description('How many minutes a VM has between the announcement of its deletion and the deletion.')
@minValue(5)
@maxValue(15)
param terminateNoticeMinutes int = 15

resource identity 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' = {
  name: '${scaleSetName}-sender'
  location: location
  tags: tags
}

module hub 'eventhub.bicep' = {
  name: 'scheduled-events-hub'
  params: {
    location: location
    tags: tags
    namespaceName: namespaceName
    eventHubName: eventHubName
    partitionCount: partitionCount
    retentionHours: retentionHours
    consumerGroups: consumerGroups
    throughputUnits: throughputUnits
    maximumThroughputUnits: maximumThroughputUnits
    senderPrincipalId: identity.properties.principalId
  }
}

module scaleSet 'scaleset.bicep' = {
  name: 'scheduled-events-scale-set'
  params: {
    location: location
    tags: tags
    scaleSetName: scaleSetName
    instanceCount: instanceCount
    vmSize: vmSize
    zones: zones
    subnetId: subnetId
    adminUsername: adminUsername
    sshPublicKey: sshPublicKey
    identityId: identity.id
    identityClientId: identity.properties.clientId
    eventHubsHost: hub.outputs.host
    eventHubName: eventHubName
    wheelUrl: wheelUrl
    wheelSha256: wheelSha256
    terminateNoticeMinutes: terminateNoticeMinutes
  }
}

output eventHubsHost string = hub.outputs.host
output senderClientId string = identity.properties.clientId
