// Records straight into a Log Analytics workspace, without an event hub: the table, a data collection rule that takes
// records by the Logs Ingestion API, the function that the queries read, and the right to send for one identity.
// Use: docs/howto/log-analytics.md
targetScope = 'resourceGroup'

@description('Where the rule is made: the region of the workspace.')
param location string = resourceGroup().location

@description('Tags of the rule.')
param tags object = {}

@description('The workspace, in this resource group.')
param workspaceName string

@description('The data collection rule. Azure takes 30 characters at most for a rule with a separate address.')
@maxLength(30)
param ruleName string = 'scheduled-events'

@description('The object (principal) id of the identity that the agents send as.')
param senderPrincipalId string

// Monitoring Metrics Publisher, the same in every tenant: the role that the Logs Ingestion API asks for
var senderRoleId = '3913510d-42f4-4e42-8a64-420c390055eb'
var stream = 'Custom-ScheduledEventRecords'
// transformKql takes no comments, and only those begin with a slash
var lines = split(loadTextContent('kql/log-analytics/transform.kql'), '\n')
var transform = join(filter(lines, line => !startsWith(line, '/')), '\n')

resource workspace 'Microsoft.OperationalInsights/workspaces@2022-10-01' existing = {
  name: workspaceName
}

resource table 'Microsoft.OperationalInsights/workspaces/tables@2022-10-01' = {
  parent: workspace
  name: 'ScheduledEvents_CL'
  properties: loadJsonContent('kql/log-analytics/table.json').properties
}

resource records 'Microsoft.OperationalInsights/workspaces/savedSearches@2020-08-01' = {
  parent: workspace
  name: 'ScheduledEventRecords'
  dependsOn: [table]
  properties: {
    category: 'ScheduledEvents'
    displayName: 'ScheduledEventRecords'
    functionAlias: 'ScheduledEventRecords'
    functionParameters: 'period:timespan'
    query: loadTextContent('kql/log-analytics/ScheduledEventRecords.kql')
    version: 2
  }
}

resource rule 'Microsoft.Insights/dataCollectionRules@2023-03-11' = {
  name: ruleName
  location: location
  tags: tags
  kind: 'Direct'
  dependsOn: [table]
  properties: {
    streamDeclarations: {
      '${stream}': {
        columns: [
          {
            name: 'RawData'
            type: 'string'
          }
        ]
      }
    }
    destinations: {
      logAnalytics: [
        {
          name: 'workspace'
          workspaceResourceId: workspace.id
        }
      ]
    }
    dataFlows: [
      {
        streams: [stream]
        destinations: ['workspace']
        transformKql: transform
        outputStream: 'Custom-ScheduledEvents_CL'
      }
    ]
  }
}

// On the rule, not on the workspace: an agent may send here and do nothing else.
resource sender 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  scope: rule
  name: guid(rule.id, senderPrincipalId, senderRoleId)
  properties: {
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', senderRoleId)
    principalId: senderPrincipalId
    principalType: 'ServicePrincipal'
  }
}

// The url of the sink.
output url string = '${rule.properties.endpoints.logsIngestion}/dataCollectionRules/${rule.properties.immutableId}/streams/${stream}?api-version=2023-01-01'
