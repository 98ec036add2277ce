#Requires -Version 5.1
#Requires -RunAsAdministrator
<#
.SYNOPSIS
Installs, upgrades, or removes the Scheduled Events Bridge as a Windows service. You can run the script again at any
time.

.DESCRIPTION
%ProgramFiles%\scheduled-events-bridge   the command, and the program in versions\TIME. The previous version is kept
%ProgramData%\scheduled-events-bridge    config.toml (written only if it does not exist), the state, and the logs. Only
                                         administrators and the service have access

The service runs as NT SERVICE\scheduled-events-bridge, a separate account without a password. It starts with Windows.
If the service exits, Windows restarts it. Windows notifies the service of a shutdown before the network stops. If a new
version rejects the existing configuration, the script does not install it, and the previous version continues to run.

.PARAMETER Extras
The extras to install from the archive of a release: apprise, template, websocket. The archive also contains the agent
and every library. The script verifies the hash of each file, and does not use a package index.

.PARAMETER Package
For an installation from a checkout: the path of a wheel of the agent. To install extras, add them in brackets, for
example 'C:\...-none-any.whl[apprise]'. The script installs the library versions in ..\artifact\requirements.txt. It
verifies the hash of each file, even if your pip settings (PIP_INDEX_URL, pip.ini) name another package index.

.PARAMETER Python
The python.exe of Python 3.10 or newer, installed for all users.

.PARAMETER Config
A configuration file that replaces the existing file.

.PARAMETER Uninstall
Removes the service and the program.

.PARAMETER RemoveData
With -Uninstall: also removes the configuration, the logs, and the state with undelivered records.

.EXAMPLE
.\install.ps1 -Config C:\mine\config.toml

.EXAMPLE
.\install.ps1 -Package .\scheduled_events_bridge-0.1.0-py3-none-any.whl
#>
[CmdletBinding(DefaultParameterSetName = 'Install')]
param(
    [Parameter(ParameterSetName = 'Install')]
    [string[]] $Extras = @(),
    [Parameter(ParameterSetName = 'Install')]
    [string] $Package,
    [Parameter(ParameterSetName = 'Install')]
    [string] $Python = 'python.exe',
    [Parameter(ParameterSetName = 'Install')]
    [string] $Config,
    [Parameter(Mandatory = $true, ParameterSetName = 'Uninstall')]
    [switch] $Uninstall,
    [Parameter(ParameterSetName = 'Uninstall')]
    [switch] $RemoveData
)

Set-StrictMode -Version Latest
$ErrorActionPreference = 'Stop'

$name = 'scheduled-events-bridge'
$account = "NT SERVICE\$name"
$root = Join-Path $env:ProgramFiles $name
$data = Join-Path $env:ProgramData $name
$quiet = @('--quiet', '--no-input', '--disable-pip-version-check', '--no-cache-dir')

function Invoke-Native([string] $File, [string[]] $Arguments) {
    & $File @Arguments
    if ($LASTEXITCODE -ne 0) {
        throw "$File $Arguments failed with exit code $LASTEXITCODE."
    }
}

function Stop-Agent {
    # Stop-Service waits until the service has stopped. The sinks can drain for stop_grace_seconds.
    Get-Service -Name $name -ErrorAction SilentlyContinue | Stop-Service
}

function Remove-Agent {
    Stop-Agent
    if (Get-Service -Name $name -ErrorAction SilentlyContinue) {
        Invoke-Native 'sc.exe' @('delete', $name)
    }
    if (Test-Path $root) {
        Remove-Item -Path $root -Recurse -Force
    }
    if ($RemoveData -and (Test-Path $data)) {
        Remove-Item -Path $data -Recurse -Force
    }
}

function Find-BasePython {
    # The service needs the base interpreter instead of a venv's python.exe. For the reason, see service.py.
    $base = Invoke-Native $Python @('-I', '-c', 'import sys; print(sys._base_executable)')
    $code = 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))'
    Invoke-Native $base @('-I', '-c', $code)
    $isNewer = Invoke-Native $base @('-I', '-c', 'import sys; print(sys.version_info >= (3, 15))')
    if ($isNewer -eq 'True') {
        Write-Warning 'The agent is tested with Python 3.10 to 3.14 only.'
    }
    if ($base -like "$env:SystemDrive\Users\*" -or $base -like '*\WindowsApps\*') {
        throw "$base is installed for one user, so the service cannot use it. Install Python for all users, or set -Python."
    }
    $base
}

function Install-FromArchive([string] $Interpreter) {
    # Install the agent and all libraries from the archive, and verify the hash of each file.
    $lists = @('--requirement', (Join-Path $PSScriptRoot 'requirements.txt'))
    foreach ($extra in $Extras) {
        $lists += @('--requirement', (Join-Path $PSScriptRoot "requirements-$extra.txt"))
    }
    $offline = @('--no-index', '--find-links', (Join-Path $PSScriptRoot 'wheels'))
    $exact = @('--no-deps', '--only-binary', ':all:', '--require-hashes')
    Invoke-Native $Interpreter (@('-I', '-m', 'pip', 'install') + $quiet + $offline + $exact + $lists)
}

function Install-FromIndex([string] $Interpreter, [string] $Wheels) {
    # Download every locked library, and verify its hash. pip then installs the libraries that the agent and the extras
    # require.
    $lock = Join-Path $PSScriptRoot '..\artifact\requirements.txt'
    $exact = @('--no-deps', '--only-binary', ':all:', '--require-hashes', '--requirement', $lock, '--dest', $Wheels)
    Invoke-Native $Interpreter (@('-I', '-m', 'pip', 'download') + $quiet + $exact)
    $offline = @('--no-index', '--find-links', $Wheels)
    Invoke-Native $Interpreter (@('-I', '-m', 'pip', 'install') + $quiet + $offline + @($Package, 'pywin32'))
    Remove-Item -Path $Wheels -Recurse -Force
}

function New-Version([string] $Base, [string] $Version) {
    New-Item -ItemType Directory -Path $Version -Force | Out-Null
    $venv = Join-Path $Version 'venv'
    Invoke-Native $Base @('-I', '-m', 'venv', $venv)
    $interpreter = Join-Path $venv 'Scripts\python.exe'
    if ($Package) {
        Install-FromIndex $interpreter (Join-Path $Version 'wheels')
    }
    else {
        Install-FromArchive $interpreter
    }
    Copy-Item -Path (Join-Path $PSScriptRoot 'service.py'), (Join-Path $PSScriptRoot 'host.py') -Destination $Version
}

function Install-Config([string] $Version) {
    # Any user can create a directory in %ProgramData%, and a configuration can start programs.
    if (Test-Path $data) {
        $owner = (Get-Acl -Path $data).GetOwner([System.Security.Principal.SecurityIdentifier]).Value
        if ($owner -notin @('S-1-5-18', 'S-1-5-32-544')) {
            throw "The owner of $data is $owner, not the administrators. Check its content, and remove the directory."
        }
    }
    foreach ($directory in @($data, (Join-Path $data 'state'), (Join-Path $data 'logs'))) {
        New-Item -ItemType Directory -Path $directory -Force | Out-Null
    }
    $file = Join-Path $data 'config.toml'
    $wanted = if ($Config) { $Config } elseif (Test-Path $file) { $file } else { Join-Path $PSScriptRoot 'config.toml' }
    $agent = Join-Path $Version 'venv\Scripts\scheduled-events-bridge.exe'
    Invoke-Native $agent @('check-config', '--config', $wanted)
    if ($wanted -ne $file) {
        Copy-Item -Path $wanted -Destination $file
    }
}

function Set-Command([string] $Command) {
    $service = Get-CimInstance -ClassName Win32_Service -Filter "Name = '$name'"
    $changed = Invoke-CimMethod -InputObject $service -MethodName Change -Arguments @{ PathName = $Command }
    if ($changed.ReturnValue -ne 0) {
        throw "The service cannot be changed: Win32_Service.Change returned $($changed.ReturnValue)."
    }
}

function Register-Agent([string] $Base, [string] $Version) {
    $command = '"{0}" -I "{1}"' -f $Base, (Join-Path $Version 'service.py')
    if (Get-Service -Name $name -ErrorAction SilentlyContinue) {
        Set-Command $command
    }
    else {
        # A delayed start would be two minutes after a boot, but an eviction has a notice of only 30 seconds.
        New-Service -Name $name -BinaryPathName $command -DisplayName 'Scheduled Events Bridge' `
            -Description 'Forwards Azure scheduled events from this VM.' -StartupType Automatic `
            -DependsOn 'Tcpip', 'Dnscache' | Out-Null
    }
    Invoke-Native 'sc.exe' @('config', $name, 'obj=', $account)
    # Windows restarts the service after 5 s, then after 30 s, and then after 5 minutes each time. A day without a
    # failure resets the count.
    $actions = 'restart/5000/restart/30000/restart/300000'
    Invoke-Native 'sc.exe' @('failure', $name, 'reset=', '86400', 'actions=', $actions)
    # The timeout in milliseconds must exceed stop_grace_seconds (10) by more than a second.
    Invoke-Native $Base @('-I', (Join-Path $Version 'service.py'), 'preshutdown', '20000')
}

function Protect-Data {
    # Windows translates the names of the system account and of the administrators, so use their SIDs.
    $owners = @('*S-1-5-18:(OI)(CI)F', '*S-1-5-32-544:(OI)(CI)F')
    Invoke-Native 'icacls.exe' @($data, '/setowner', '*S-1-5-32-544')
    Invoke-Native 'icacls.exe' (@($data, '/inheritance:r', '/grant:r') + $owners + @("${account}:(OI)(CI)RX"))
    foreach ($directory in @('state', 'logs')) {
        Invoke-Native 'icacls.exe' @((Join-Path $data $directory), '/grant:r', "${account}:(OI)(CI)M")
    }
}

function Publish-Version([string] $Version) {
    $line = '@"{0}" %*' -f (Join-Path $Version 'venv\Scripts\scheduled-events-bridge.exe')
    Set-Content -Path (Join-Path $root "$name.cmd") -Value $line -Encoding Ascii
    Get-ChildItem -Path (Join-Path $root 'versions') -Directory | Sort-Object -Property Name -Descending |
        Select-Object -Skip 2 | Remove-Item -Recurse -Force
}

if ($Uninstall) {
    Remove-Agent
    return
}
if (-not $Package -and -not (Test-Path (Join-Path $PSScriptRoot 'wheels'))) {
    throw 'The script is not in the archive of a release. Set -Package to the wheel of the agent.'
}
if ($Package -and $Extras) {
    throw 'With -Package, add the extras in brackets after the wheel. -Extras works only with the archive of a release.'
}
$base = Find-BasePython
$version = Join-Path $root ('versions\' + (Get-Date -Format 'yyyyMMddTHHmmss'))
try {
    New-Version $base $version
    Install-Config $version
}
catch {
    if (Test-Path $version) {
        Remove-Item -Path $version -Recurse -Force
    }
    throw
}
$old = Get-CimInstance -ClassName Win32_Service -Filter "Name = '$name'"
Stop-Agent
try {
    Register-Agent $base $version
    Protect-Data
    Start-Service -Name $name
}
catch {
    # After any failure, restore the previous version, if it exists.
    if ($old) {
        Stop-Agent
        Set-Command $old.PathName
        Start-Service -Name $name
        Remove-Item -Path $version -Recurse -Force -ErrorAction SilentlyContinue
    }
    throw
}
Publish-Version $version
Get-Service -Name $name
