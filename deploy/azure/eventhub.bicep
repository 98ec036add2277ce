// Creates an Event Hubs namespace with one event hub, and allows one identity to send to the hub. The namespace does
// not accept keys. Readers need the role "Azure Event Hubs Data Receiver" on the hub or on a consumer group.
param location string
param tags object
param namespaceName string
param eventHubName string
param partitionCount int
param retentionHours int
param consumerGroups array
param throughputUnits int
param maximumThroughputUnits int

@description('The object (principal) ID of the identity that sends records.')
param senderPrincipalId string

// The role Azure Event Hubs Data Sender, which has the same ID in every tenant.
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

// The scope is the hub and not the namespace, so the agents can only send to this hub.
resource sender 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  scope: hub
  name: guid(hub.id, senderPrincipalId, senderRoleId)
  properties: {
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', senderRoleId)
    principalId: senderPrincipalId
    principalType: 'ServicePrincipal'
  }
}

// The endpoint is https://NAME.servicebus.windows.net:443/ in the public cloud. Other clouds have another suffix.
output host string = split(replace(eventHubs.properties.serviceBusEndpoint, 'https://', ''), ':')[0]
