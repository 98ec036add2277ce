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

@description('Size of the VMs. With NVMe disks (v6 and later) set stateDisk. OS upgrades of G, H, M, N are not announced.')
param vmSize string = 'Standard_D2s_v5'

@description('How the VM names the disk of LUN 0. Sizes with NVMe disks (v6 and later): /dev/disk/azure/data/by-lun/0.')
param stateDisk string = '/dev/disk/azure/scsi1/lun0'

@description('One that Azure upgrades by itself, or {id: ...} of your own, with Python 3.10 or newer.')
param image object = {
  publisher: 'Canonical'
  offer: '0001-com-ubuntu-server-jammy'
  sku: '22_04-lts-gen2'
  version: 'latest'
}

@description('Availability zones, such as ["1", "2", "3"]; empty for none.')
param zones array = []

@description('Resource id of the subnet. Its VMs need a way out, such as a NAT gateway: to what, see README.md.')
param subnetId string

@description('The administrator of the VMs.')
param adminUsername string = 'azureuser'

@description('The public SSH key of the administrator.')
param sshPublicKey string

@description('Where the VMs fetch the agent from: the archive of a release (.tar.gz) for their kind of machine, or a wheel. It must end with the name of the file, but for a query.')
@secure()
param wheelUrl string

@description('SHA-256 of that file, in hexadecimal. The libraries of a wheel are those that the package index has then: README.md.')
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
    image: image
    stateDisk: stateDisk
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
