// Prepares a Log Analytics workspace to receive records without an event hub. The file creates the table, a data
// collection rule that receives records through the Logs Ingestion API, and the function that the queries use. It also
// allows one identity to send records. For instructions, see docs/howto/log-analytics.md
targetScope = 'resourceGroup'

@description('The region of the rule, which must be the region of the workspace.')
param location string = resourceGroup().location

@description('The tags of the rule.')
param tags object = {}

@description('The workspace, in this resource group.')
param workspaceName string

@description('The name of the data collection rule. Azure allows at most 30 characters for a rule with a separate address.')
@maxLength(30)
param ruleName string = 'scheduled-events'

@description('The object (principal) ID of the identity that the agents use to send records.')
param senderPrincipalId string

// The role Monitoring Metrics Publisher, which the Logs Ingestion API requires. It has the same ID in every tenant.
var senderRoleId = '3913510d-42f4-4e42-8a64-420c390055eb'
var stream = 'Custom-ScheduledEventRecords'
// transformKql does not support comments. Only comment lines start with a slash.
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

// The scope is the rule and not the workspace, so the agents can only send to this rule.
resource sender 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  scope: rule
  name: guid(rule.id, senderPrincipalId, senderRoleId)
  properties: {
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', senderRoleId)
    principalId: senderPrincipalId
    principalType: 'ServicePrincipal'
  }
}

// The url setting of the sink.
output url string = '${rule.properties.endpoints.logsIngestion}/dataCollectionRules/${rule.properties.immutableId}/streams/${stream}?api-version=2023-01-01'
