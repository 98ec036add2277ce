// Installs the version of policy.bicep or management-group.bicep on the existing VMs and scale sets of one subscription
// and one ring. Each deployment creates a new task, and Azure stops a task if too many installations fail. The task
// belongs to the subscription, because Azure cannot evaluate compliance again at the scope of a management group.
// For instructions, see docs/operate/fleet.md
targetScope = 'subscription'

@description('The ring, as in policy.bicep or management-group.bicep.')
param ring string

@description('The management group of management-group.bicep. If empty, the policy belongs to this subscription.')
param managementGroupName string = ''

@description('The maximum number of VMs, and of scale sets, that Azure changes at the same time.')
@minValue(1)
@maxValue(30)
param parallelDeployments int = 10

@description('The part of the deployments that may fail before Azure stops the task, for example 0.05 for 5 %.')
param failureThreshold string = '0.05'

@description('Makes the name of the task unique.')
param time string = utcNow('yyyyMMddHHmmss')

var managementGroupId = tenantResourceId('Microsoft.Management/managementGroups', managementGroupName)
var policyScope = empty(managementGroupName) ? subscription().id : managementGroupId
var assignmentId = extensionResourceId(policyScope, 'Microsoft.Authorization/policyAssignments', 'bridge-${ring}')

resource virtualMachines 'Microsoft.PolicyInsights/remediations@2021-10-01' = {
  name: 'scheduled-events-bridge-${ring}-virtual-machines-${time}'
  properties: {
    policyAssignmentId: assignmentId
    policyDefinitionReferenceId: 'virtualMachines'
    resourceDiscoveryMode: 'ReEvaluateCompliance'
    resourceCount: 50000
    parallelDeployments: parallelDeployments
    failureThreshold: {
      percentage: json(failureThreshold)
    }
  }
}

resource scaleSets 'Microsoft.PolicyInsights/remediations@2021-10-01' = {
  name: 'scheduled-events-bridge-${ring}-scale-sets-${time}'
  properties: {
    policyAssignmentId: assignmentId
    policyDefinitionReferenceId: 'scaleSets'
    resourceDiscoveryMode: 'ReEvaluateCompliance'
    resourceCount: 50000
    parallelDeployments: parallelDeployments
    failureThreshold: {
      percentage: json(failureThreshold)
    }
  }
}
