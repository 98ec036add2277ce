"""Runs the agent as a Windows service.

install.ps1 registers the service and creates a venv next to this file.

The service runs the base interpreter directly and adds the venv's packages to the path. The venv's python.exe would
start the base interpreter as a second process, which the Windows service manager cannot monitor.

With the arguments `preshutdown MILLISECONDS`, this program sets how long Windows waits for the service during a
shutdown. Windows does not include a command for this setting.
"""
# ruff: noqa: INP001  # a program, not a package

from __future__ import annotations

import os
import site
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from host import Host

NAME = "scheduled-events-bridge"
HERE = Path(__file__).resolve().parent


def main() -> int:
    """Run the agent as a service, or set the shutdown timeout. Return the exit code."""
    # addsitedir also reads pywin32.pth, which adds the modules and DLLs of pywin32 to the path.
    site.addsitedir(str(HERE / "venv" / "Lib" / "site-packages"))
    sys.path.insert(0, str(HERE))  # python -I does not add this directory
    if sys.argv[1:2] == ["preshutdown"]:
        return _wait_at_shutdown(milliseconds=int(sys.argv[2]))
    from host import Host, redirect_output  # noqa: PLC0415

    redirect_output(Path(os.environ["PROGRAMDATA"], NAME, "logs", "agent.log"))
    host = Host()
    with ThreadPoolExecutor(1, "service-manager") as pool:
        served = pool.submit(_serve, host)
        served.add_done_callback(lambda _: host.stop())  # stop if the connection to the service manager fails
        code: int = host.run()
        served.result()
    return code


def _serve(host: Host) -> None:
    """Connect to the Windows service manager, and run the service until the agent stops."""
    if sys.platform != "win32":
        raise OSError("Windows services exist only on Windows.")
    import servicemanager  # noqa: PLC0415
    import win32service  # noqa: PLC0415
    import win32serviceutil  # noqa: PLC0415

    class Service(win32serviceutil.ServiceFramework):
        _svc_name_ = NAME
        _svc_display_name_ = "Scheduled Events Bridge"

        def GetAcceptedControls(self) -> int:  # noqa: N802
            # Preshutdown arrives while the network still works, and allows more time than shutdown.
            accepted: int = super().GetAcceptedControls()  # type: ignore[no-untyped-call]
            return accepted | win32service.SERVICE_ACCEPT_PRESHUTDOWN

        def SvcOtherEx(self, control: int, _event_type: int, _data: Any) -> None:  # noqa: N802
            if control == win32service.SERVICE_CONTROL_PRESHUTDOWN:
                self.SvcStop()

        def SvcStop(self) -> None:  # noqa: N802
            self.ReportServiceStatus(win32service.SERVICE_STOP_PENDING)
            host.stop()

        def SvcDoRun(self) -> None:  # noqa: N802
            while not host.finished.wait(1.0):
                if host.is_stopping:  # extends the time limit while the sinks drain
                    self.ReportServiceStatus(win32service.SERVICE_STOP_PENDING)
            if host.exit_code:
                # Exit without reporting SERVICE_STOPPED, because the service manager then restarts the service.
                os._exit(host.exit_code)

    servicemanager.Initialize()
    servicemanager.PrepareToHostSingle(Service)
    servicemanager.StartServiceCtrlDispatcher()  # type: ignore[no-untyped-call]


def _wait_at_shutdown(*, milliseconds: int) -> int:
    if sys.platform != "win32":
        raise OSError("Windows services exist only on Windows.")
    import win32service as windows  # noqa: PLC0415

    manager = windows.OpenSCManager(None, None, windows.SC_MANAGER_CONNECT)
    service = windows.OpenService(manager, NAME, windows.SERVICE_CHANGE_CONFIG)
    windows.ChangeServiceConfig2(service, windows.SERVICE_CONFIG_PRESHUTDOWN_INFO, milliseconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
