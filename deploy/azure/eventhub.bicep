// An Event Hubs namespace with one hub, and one identity that may send to it. There are no keys: who reads needs the role
// "Azure Event Hubs Data Receiver" on the hub or on a consumer group.
param location string
param tags object
param namespaceName string
param eventHubName string
param partitionCount int
param retentionHours int
param consumerGroups array
param throughputUnits int
param maximumThroughputUnits int

@description('The object (principal) id of the identity that sends.')
param senderPrincipalId string

// Azure Event Hubs Data Sender, the same in every tenant
var senderRoleId = '2b629674-e913-4c01-ae53-ef4638d8f975'
var grows = maximumThroughputUnits > throughputUnits

resource eventHubs 'Microsoft.EventHub/namespaces@2024-01-01' = {
  name: namespaceName
  location: location
  tags: tags
  sku: {
    name: 'Standard'
    tier: 'Standard'
    capacity: throughputUnits
  }
  properties: {
    disableLocalAuth: true
    minimumTlsVersion: '1.2'
    isAutoInflateEnabled: grows
    maximumThroughputUnits: grows ? maximumThroughputUnits : 0
  }
}

resource hub 'Microsoft.EventHub/namespaces/eventhubs@2024-01-01' = {
  parent: eventHubs
  name: eventHubName
  properties: {
    partitionCount: partitionCount
    retentionDescription: {
      cleanupPolicy: 'Delete'
      retentionTimeInHours: retentionHours
    }
  }
}

resource readers 'Microsoft.EventHub/namespaces/eventhubs/consumergroups@2024-01-01' = [
  for group in consumerGroups: {
    parent: hub
    name: group
  }
]

// On the hub, not on the namespace: an agent may send here and do nothing else.
resource sender 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  scope: hub
  name: guid(hub.id, senderPrincipalId, senderRoleId)
  properties: {
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', senderRoleId)
    principalId: senderPrincipalId
    principalType: 'ServicePrincipal'
  }
}

// https://NAME.servicebus.windows.net:443/ in the public cloud, another suffix in others
output host string = split(replace(eventHubs.properties.serviceBusEndpoint, 'https://', ''), ':')[0]
