// Creates a scale set of Linux VMs with the agent. The scale set is Uniform, because Azure upgrades the OS image
// automatically only in Uniform scale sets.
param location string
param tags object
param scaleSetName string
param instanceCount int
param vmSize string
param image object
param stateDisk string
param zones array
param subnetId string
param adminUsername string
param sshPublicKey string

@description('The resource ID of the user-assigned identity that sends to the hub.')
param identityId string

@description('The client ID of the same identity, because a VM can have several identities.')
param identityClientId string

param eventHubsHost string
param eventHubName string

@description('The URL is secure, because it can contain a signature. The deployment history shows all other parameters.')
@secure()
param wheelUrl string

param wheelSha256 string
param terminateNoticeMinutes int

var config = replace(
  replace(replace(loadTextContent('config.toml'), '{{HOST}}', eventHubsHost), '{{EVENT_HUB}}', eventHubName),
  '{{CLIENT_ID}}',
  identityClientId
)
var files = replace(
  replace(
    replace(
      replace(
        replace(
          replace(loadTextContent('cloud-init.yaml'), '{{SETUP}}', loadFileAsBase64('setup.sh')),
          '{{TRY_TREE}}',
          loadFileAsBase64('../systemd/try_tree.py')
        ),
        '{{INSTALL}}',
        loadFileAsBase64('../systemd/install.sh')
      ),
      '{{SERVICE}}',
      loadFileAsBase64('../systemd/scheduled-events-bridge.service')
    ),
    '{{SYSUSERS}}',
    loadFileAsBase64('../systemd/scheduled-events-bridge.sysusers.conf')
  ),
  '{{CONFIG}}',
  base64(config)
)
var cloudInit = replace(
  replace(replace(files, '{{WHEEL_URL}}', wheelUrl), '{{WHEEL_SHA256}}', wheelSha256),
  '{{STATE_DISK}}',
  stateDisk
)

resource scaleSet 'Microsoft.Compute/virtualMachineScaleSets@2024-07-01' = {
  name: scaleSetName
  location: location
  tags: tags
  zones: empty(zones) ? null : zones
  identity: {
    type: 'UserAssigned'
    userAssignedIdentities: {
      '${identityId}': {}
    }
  }
  sku: {
    name: vmSize
    tier: 'Standard'
    capacity: instanceCount
  }
  properties: {
    orchestrationMode: 'Uniform'
    // With overprovisioning, Azure deletes the additional VMs immediately, and each of them would send a Terminate
    // record.
    overprovision: false
    singlePlacementGroup: false
    upgradePolicy: {
      mode: 'Rolling'
      automaticOSUpgradePolicy: {
        enableAutomaticOSUpgrade: true
      }
      rollingUpgradePolicy: {
        maxBatchInstancePercent: 20
        maxUnhealthyInstancePercent: 20
        maxUnhealthyUpgradedInstancePercent: 20
        pauseTimeBetweenBatches: 'PT1M'
      }
    }
    virtualMachineProfile: {
      osProfile: {
        computerNamePrefix: take(scaleSetName, 9)
        adminUsername: adminUsername
        customData: base64(cloudInit)
        linuxConfiguration: {
          disablePasswordAuthentication: true
          ssh: {
            publicKeys: [
              {
                path: '/home/${adminUsername}/.ssh/authorized_keys'
                keyData: sshPublicKey
              }
            ]
          }
        }
      }
      storageProfile: {
        imageReference: image
        // An OS upgrade or a reimage replaces the OS disk, so the state is on a data disk, which they do not replace.
        osDisk: {
          createOption: 'FromImage'
          caching: 'ReadWrite'
          managedDisk: {
            storageAccountType: 'StandardSSD_LRS'
          }
        }
        dataDisks: [
          {
            lun: 0
            createOption: 'Empty'
            diskSizeGB: 4
            caching: 'None'
            managedDisk: {
              storageAccountType: 'StandardSSD_LRS'
            }
          }
        ]
      }
      networkProfile: {
        networkInterfaceConfigurations: [
          {
            name: 'nic'
            properties: {
              primary: true
              ipConfigurations: [
                {
                  name: 'ip'
                  properties: {
                    subnet: {
                      id: subnetId
                    }
                  }
                }
              ]
            }
          }
        ]
      }
      // Without these two profiles, Azure does not announce deletions, OS upgrades, and reimages.
      scheduledEventsProfile: {
        terminateNotificationProfile: {
          enable: true
          notBeforeTimeout: 'PT${terminateNoticeMinutes}M'
        }
        osImageNotificationProfile: {
          enable: true
          notBeforeTimeout: 'PT15M' // the only value that Azure allows
        }
      }
      // Automatic OS upgrades require a health check. If the VMs run a service, use the health check of that service
      // instead.
      extensionProfile: {
        extensions: [
          {
            name: 'health'
            properties: {
              publisher: 'Microsoft.ManagedServices'
              type: 'ApplicationHealthLinux'
              typeHandlerVersion: '1.0'
              autoUpgradeMinorVersion: true
              settings: {
                protocol: 'http'
                port: 9464
                requestPath: '/healthz'
              }
            }
          }
        ]
      }
    }
  }
}
