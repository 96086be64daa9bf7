"""Looks at the status page with headless Chromium: waits, takes a picture, and prints what is there as JSON.

    look.py URL PICTURE [--seconds N] [--dark] [--width N] [--keys Tab,Enter]

The JSON has the visible text, errors of the script, requests to other places, and what has the focus after the keys.
"""

import argparse
import asyncio
import base64
import itertools
import json
import subprocess
import sys
import tempfile
import urllib.request

import websockets


async def look(options, port):
    targets = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list"))
    socket = next(target for target in targets if target["type"] == "page")["webSocketDebuggerUrl"]
    ids = itertools.count(1)
    errors, requests = [], []
    async with websockets.connect(socket, max_size=None) as page:

        def note(message):
            parameters = message.get("params", {})
            match message.get("method"):
                case "Runtime.exceptionThrown":
                    details = parameters["exceptionDetails"]
                    errors.append(details.get("exception", {}).get("description", details["text"]))
                case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                    errors.append(parameters["entry"]["text"] + " " + parameters["entry"].get("url", ""))
                case "Network.requestWillBeSent":
                    requests.append(parameters["request"]["url"][:200])

        async def ask(method, **parameters):
            number = next(ids)
            await page.send(json.dumps({"id": number, "method": method, "params": parameters}))
            while True:
                message = json.loads(await page.recv())
                if message.get("id") == number:
                    if "error" in message:
                        sys.exit(f"{method}: {message['error']}")
                    return message["result"]
                note(message)

        for domain in ("Page", "Runtime", "Log", "Network"):
            await ask(f"{domain}.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if options.dark else "light"}]
        await ask("Emulation.setEmulatedMedia", features=scheme)
        metrics = {"width": options.width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await ask("Emulation.setDeviceMetricsOverride", **metrics)
        await ask("Page.navigate", url=options.url)
        # Messages of the page come meanwhile.
        deadline = asyncio.get_running_loop().time() + options.seconds
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            try:
                note(json.loads(await asyncio.wait_for(page.recv(), left)))
            except TimeoutError:
                break
        for key in filter(None, options.keys.split(",")):
            for kind in ("rawKeyDown", "keyUp"):
                codes = {"Tab": 9, "Enter": 13}
                await ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])
        size = (await ask("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": options.width, "height": size["height"], "scale": 1}
        shot = await ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        with open(options.picture, "wb") as file:
            file.write(base64.b64decode(shot["data"]))
        script = """JSON.stringify({
            text: document.body.innerText,
            nodes: [...document.querySelectorAll('.node')].map((node) => node.getAttribute('aria-label')),
            edges: document.querySelectorAll('.edge').length,
            focus: document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText,
            wide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
        })"""
        found = json.loads((await ask("Runtime.evaluate", expression=script))["result"]["value"])
        print(json.dumps({**found, "errors": errors, "requests": sorted(set(requests))}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("picture")
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--keys", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as profile:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        arguments += [f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
        browser = subprocess.Popen(["chromium", *arguments], stderr=subprocess.PIPE, text=True)
        try:
            for line in browser.stderr:
                if "DevTools listening on" in line:
                    port = line.split("127.0.0.1:")[1].split("/")[0]
                    asyncio.run(look(options, port))
                    return
            sys.exit("Chromium did not start")
        finally:
            browser.kill()
            browser.wait()


main()
