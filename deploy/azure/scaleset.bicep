// A scale set of Linux VMs with the agent on each. Uniform, because Azure upgrades the OS image by itself only there.
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

@description('Resource id of the user-assigned identity that sends to the hub.')
param identityId string

@description('Client id of the same identity; a VM may have several.')
param identityClientId string

param eventHubsHost string
param eventHubName string

@description('Secure, because it may hold a signature: the history of deployments shows all other parameters.')
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
    // More VMs than asked for, to be deleted again at once, would each send their Terminate.
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
        // An OS upgrade and a reimage give the VM a new OS disk, so the state is on a disk that they leave alone.
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
      // Without these two, Azure announces neither deletions nor OS upgrades and reimages.
      scheduledEventsProfile: {
        terminateNotificationProfile: {
          enable: true
          notBeforeTimeout: 'PT${terminateNoticeMinutes}M'
        }
        osImageNotificationProfile: {
          enable: true
          notBeforeTimeout: 'PT15M' // the only value that Azure takes
        }
      }
      // Automatic OS upgrades need to know whether a VM is well. Where the VMs do something of their own, ask that instead.
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
