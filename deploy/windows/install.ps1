#Requires -Version 5.1
#Requires -RunAsAdministrator
<#
.SYNOPSIS
Installs, upgrades or removes the Scheduled Events Bridge as a Windows service. Run it again as often as you like.

.DESCRIPTION
%ProgramFiles%\scheduled-events-bridge   the program: versions\TIME, of which the one before is kept, and a command
%ProgramData%\scheduled-events-bridge    config.toml (written only if there is none), state, logs; for administrators
                                         and the service alone

The service runs as NT SERVICE\scheduled-events-bridge, a separate account without a password. It starts with
Windows, is restarted when it ends by itself, and is notified of a shutdown before the network stops. A version that refuses
the existing configuration is not installed: the old one goes on.

.PARAMETER Extras
apprise, template, websocket: with the archive of a release, which holds them. It holds the agent and every library too,
each file is compared with its hash, and no index is asked.

.PARAMETER Package
From a checkout: the path of a wheel of the agent, with extras in brackets where you want some:
'C:\...-none-any.whl[apprise]'. Its libraries have the versions of ..\artifact\requirements.txt, and each file is
compared with its hash there, whatever index a pip setting of your own (PIP_INDEX_URL, pip.ini) names.

.PARAMETER Python
A python.exe of 3.10 or newer, installed for all users.

.PARAMETER Config
A configuration that replaces the existing one.

.PARAMETER Uninstall
Removes the service and the program.

.PARAMETER RemoveData
With -Uninstall: removes the configuration, the logs and what was not delivered yet, too.

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
        throw "$File $Arguments ended with exit code $LASTEXITCODE."
    }
}

function Stop-Agent {
    # It waits until the service says that it has stopped: its sinks may drain for stop_grace_seconds.
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
    # Not a venv's own python.exe: service.py says why.
    $base = Invoke-Native $Python @('-I', '-c', 'import sys; print(sys._base_executable)')
    $code = 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))'
    Invoke-Native $base @('-I', '-c', $code)
    $isNewer = Invoke-Native $base @('-I', '-c', 'import sys; print(sys.version_info >= (3, 15))')
    if ($isNewer -eq 'True') {
        Write-Warning 'The agent has not been tested on a Python beyond 3.14. It may well work.'
    }
    if ($base -like "$env:SystemDrive\Users\*" -or $base -like '*\WindowsApps\*') {
        throw "$base belongs to one user, and the service is another. Install Python for all users, or name one: -Python."
    }
    $base
}

function Install-FromArchive([string] $Interpreter) {
    # The agent and all that it needs, each file by its hash.
    $lists = @('--requirement', (Join-Path $PSScriptRoot 'requirements.txt'))
    foreach ($extra in $Extras) {
        $lists += @('--requirement', (Join-Path $PSScriptRoot "requirements-$extra.txt"))
    }
    $offline = @('--no-index', '--find-links', (Join-Path $PSScriptRoot 'wheels'))
    $exact = @('--no-deps', '--only-binary', ':all:', '--require-hashes')
    Invoke-Native $Interpreter (@('-I', '-m', 'pip', 'install') + $quiet + $offline + $exact + $lists)
}

function Install-FromIndex([string] $Interpreter, [string] $Wheels) {
    # Every library of the lock, by its hash; of them pip takes what the agent and the extras ask for.
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
    # Any user may make a directory in %ProgramData%, and a configuration may name a program to start.
    if (Test-Path $data) {
        $owner = (Get-Acl -Path $data).GetOwner([System.Security.Principal.SecurityIdentifier]).Value
        if ($owner -notin @('S-1-5-18', 'S-1-5-32-544')) {
            throw "$data belongs to $owner, not to the administrators. Look at what is in it, and take it away."
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
        throw "The service could not be changed: Win32_Service.Change returned $($changed.ReturnValue)."
    }
}

function Register-Agent([string] $Base, [string] $Version) {
    $command = '"{0}" -I "{1}"' -f $Base, (Join-Path $Version 'service.py')
    if (Get-Service -Name $name -ErrorAction SilentlyContinue) {
        Set-Command $command
    }
    else {
        # At once and not delayed: that would be two minutes after a boot, and an eviction leaves thirty seconds.
        New-Service -Name $name -BinaryPathName $command -DisplayName 'Scheduled Events Bridge' `
            -Description 'Forwards Azure scheduled events from this VM.' -StartupType Automatic `
            -DependsOn 'Tcpip', 'Dnscache' | Out-Null
    }
    Invoke-Native 'sc.exe' @('config', $name, 'obj=', $account)
    # After 5 s, 30 s, and from then on 5 minutes; a day without a fault resets the count.
    $actions = 'restart/5000/restart/30000/restart/300000'
    Invoke-Native 'sc.exe' @('failure', $name, 'reset=', '86400', 'actions=', $actions)
    # stop_grace_seconds (10) and a second more must fit in. Raise it when you raise that.
    Invoke-Native $Base @('-I', (Join-Path $Version 'service.py'), 'preshutdown', '20000')
}

function Protect-Data {
    # By their numbers, because their names are translated: the system, and administrators.
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
    throw 'This is not an archive of a release. Set the wheel of the agent, -Package.'
}
if ($Package -and $Extras) {
    throw 'With -Package the extras stand behind the wheel, in brackets; -Extras is for the archive of a release.'
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
    # Whatever it was, the version before goes on, if there was one.
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
