"""The program that the Windows service is; install.ps1 registers it and puts it, and a venv, into one directory.

It runs on the interpreter that the venv was made from, not on the venv's own python.exe: that one only starts the other
as a second process, and the service manager knows only the first. For the same reason there is no pythonservice.exe.
What the venv holds is put on the path here.

With two arguments, `preshutdown MILLISECONDS`, it does what no command of Windows does: it sets how long a shutdown
waits for the service.
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
    """Run the agent as a service, or set the time that a shutdown leaves it; return the exit code."""
    # It reads pywin32.pth too, which makes the modules of pywin32 and their DLLs known.
    site.addsitedir(str(HERE / "venv" / "Lib" / "site-packages"))
    sys.path.insert(0, str(HERE))  # python -I leaves it out
    if sys.argv[1:2] == ["preshutdown"]:
        return _wait_at_shutdown(milliseconds=int(sys.argv[2]))
    from host import Host, redirect_output  # noqa: PLC0415

    redirect_output(Path(os.environ["PROGRAMDATA"], NAME, "logs", "agent.log"))
    host = Host()
    with ThreadPoolExecutor(1, "service-manager") as pool:
        served = pool.submit(_serve, host)
        served.add_done_callback(lambda _: host.stop())  # without a service manager there is no service
        code: int = host.run()
        served.result()
    return code


def _serve(host: Host) -> None:
    """Connect to the service manager, and do what it asks until the agent has ended."""
    if sys.platform != "win32":
        raise OSError("There are services of this kind on Windows only.")
    import servicemanager  # noqa: PLC0415
    import win32service  # noqa: PLC0415
    import win32serviceutil  # noqa: PLC0415

    class Service(win32serviceutil.ServiceFramework):
        _svc_name_ = NAME
        _svc_display_name_ = "Scheduled Events Bridge"

        def GetAcceptedControls(self) -> int:  # noqa: N802
            # Told before the network goes, and given more time than at the shutdown itself.
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
                if host.is_stopping:  # however long the sinks may drain: it goes on
                    self.ReportServiceStatus(win32service.SERVICE_STOP_PENDING)
            if host.exit_code:
                # Without the word that it stopped, so that the service manager starts it again as it was told to.
                os._exit(host.exit_code)

    servicemanager.Initialize()
    servicemanager.PrepareToHostSingle(Service)
    servicemanager.StartServiceCtrlDispatcher()  # type: ignore[no-untyped-call]


def _wait_at_shutdown(*, milliseconds: int) -> int:
    if sys.platform != "win32":
        raise OSError("There are services of this kind on Windows only.")
    import win32service as windows  # noqa: PLC0415

    manager = windows.OpenSCManager(None, None, windows.SC_MANAGER_CONNECT)
    service = windows.OpenService(manager, NAME, windows.SERVICE_CHANGE_CONFIG)
    windows.ChangeServiceConfig2(service, windows.SERVICE_CONFIG_PRESHUTDOWN_INFO, milliseconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
