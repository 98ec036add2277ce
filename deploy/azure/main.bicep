// Creates an event hub for the records of a fleet, and a scale set whose VMs send their records to the hub. This
// includes the identity, its role, the installation of the agent with cloud-init, and the two profiles that Azure
// requires to announce OS upgrades and deletions. For instructions, see README.md
targetScope = 'resourceGroup'

@description('The region of all resources.')
param location string = resourceGroup().location

@description('The tags of all created resources.')
param tags object = {}

@description('The name of the Event Hubs namespace, which must be unique in all of Azure because it is part of a host name.')
param namespaceName string = 'scheduled-events-${uniqueString(resourceGroup().id)}'

@description('The name of the event hub.')
param eventHubName string = 'scheduled-events'

@description('The number of partitions, which limits the number of parallel readers. You cannot change it later in the Standard tier.')
@minValue(1)
@maxValue(32)
param partitionCount int = 4

@description('The hours that the hub keeps a record. The Standard tier allows at most 7 days.')
@minValue(1)
@maxValue(168)
param retentionHours int = 168

@description('One consumer group for each system that reads all records.')
param consumerGroups array = ['logging']

@description('The minimum number of throughput units. Each unit accepts 1 MB or 1,000 records per second.')
@minValue(1)
@maxValue(40)
param throughputUnits int = 1

@description('The maximum number of throughput units. The namespace scales up automatically if many VMs send at the same time.')
@minValue(1)
@maxValue(40)
param maximumThroughputUnits int = 4

@description('The name of the scale set.')
param scaleSetName string = 'bridge'

@description('The number of VMs.')
@minValue(0)
@maxValue(1000)
param instanceCount int = 2

@description('The size of the VMs. For NVMe disks (v6 and later), also set stateDisk. Azure does not announce OS upgrades of the sizes G, H, M, and N.')
param vmSize string = 'Standard_D2s_v5'

@description('The path of the disk with LUN 0 in the VM. For NVMe disks (v6 and later): /dev/disk/azure/data/by-lun/0.')
param stateDisk string = '/dev/disk/azure/scsi1/lun0'

@description('An image that Azure upgrades automatically, or {id: ...} for your own image. The image must contain Python 3.10 or newer.')
param image object = {
  publisher: 'Canonical'
  offer: '0001-com-ubuntu-server-jammy'
  sku: '22_04-lts-gen2'
  version: 'latest'
}

@description('The availability zones, such as ["1", "2", "3"], or an empty list.')
param zones array = []

@description('The resource ID of the subnet. The VMs need outbound access, for example through a NAT gateway. See README.md.')
param subnetId string

@description('The administrator of the VMs.')
param adminUsername string = 'azureuser'

@description('The public SSH key of the administrator.')
param sshPublicKey string

@description('The URL of the archive of a release (.tar.gz) for the architecture of the VMs, or of a wheel. Its path must end with the name of the file.')
@secure()
param wheelUrl string

@description('The SHA-256 digest of this file, in hexadecimal. It does not cover the libraries of a wheel, which are from a package index.')
@minLength(64)
@maxLength(64)
param wheelSha256 string

@description('The minutes between the announcement of a deletion and the deletion of the VM.')
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
