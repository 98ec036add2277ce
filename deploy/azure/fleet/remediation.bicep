// Gives the VMs and scale sets of one ring that exist already the version that policy.bicep has for it. It is a task of its
// own each time, and Azure stops it when too many fail. Use: docs/operate/fleet.md
targetScope = 'subscription'

@description('The ring, as policy.bicep names it.')
param ring string

@description('How many VMs, and how many scale sets, at the same time.')
@minValue(1)
@maxValue(30)
param parallelDeployments int = 10

@description('Which part may fail before Azure stops the task: 0.05 is a twentieth.')
param failureThreshold string = '0.05'

@description('Makes the name of the task one of its own.')
param time string = utcNow('yyyyMMddHHmmss')

resource assignment 'Microsoft.Authorization/policyAssignments@2023-04-01' existing = {
  name: 'scheduled-events-bridge-${ring}'
}

resource virtualMachines 'Microsoft.PolicyInsights/remediations@2021-10-01' = {
  name: 'scheduled-events-bridge-${ring}-virtual-machines-${time}'
  properties: {
    policyAssignmentId: assignment.id
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
    policyAssignmentId: assignment.id
    policyDefinitionReferenceId: 'scaleSets'
    resourceDiscoveryMode: 'ReEvaluateCompliance'
    resourceCount: 50000
    parallelDeployments: parallelDeployments
    failureThreshold: {
      percentage: json(failureThreshold)
    }
  }
}
