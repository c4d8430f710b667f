"""Not a test: a service to start, watch and kill. Answers /health; its flags say how it misbehaves.

python toy_service.py PORT [--ready-after S] [--crash-after S] [--crash-before-ready LINES] [--never-ready]
                           [--deaf] [--children] [--silent-after S]
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("--ready-after", type=float, default=0.0)
parser.add_argument("--crash-after", type=float)
parser.add_argument("--crash-before-ready", type=int, metavar="LINES")
parser.add_argument("--never-ready", action="store_true")
parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
parser.add_argument("--children", action="store_true", help="start processes of one's own, some in sessions of theirs")
parser.add_argument("--silent-after", type=float, help="stop answering")
options = parser.parse_args()
began = time.monotonic()
SLEEPER = "import time; time.sleep(600)"
ORPHAN = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], start_new_session=True)"

if options.crash_before_ready is not None:
    for number in range(options.crash_before_ready):
        print(f"line {number}")
    sys.exit(7)
if options.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if options.children:
    subprocess.Popen([sys.executable, "-c", SLEEPER])
    subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
    subprocess.run([sys.executable, "-c", ORPHAN], start_new_session=True, check=True)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        age_s = time.monotonic() - began
        if options.silent_after is not None and age_s > options.silent_after:
            time.sleep(600)
        ready = not options.never_ready and age_s >= options.ready_after
        self.send_response(200 if ready else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


if options.crash_after is not None:
    threading.Timer(options.crash_after, lambda: os._exit(9)).start()
print("listening")
with ThreadingHTTPServer(("127.0.0.1", options.port), Handler) as server:
    server.daemon_threads = True
    server.serve_forever()
