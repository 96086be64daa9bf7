"""A client of a TLS server: `tls_client.py PORT PATH...` asks for all on one connection, one after the other.

Prints how many bytes it sent and got, in plaintext. `/count` is sent a body of 5000 bytes.
"""

import socket
import ssl
import sys


def main():
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    plain = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    connection = context.wrap_socket(plain)
    sent = got = 0
    for path in sys.argv[2:]:
        body = b"a" * 5000 if path == "/count" else b""
        method = "POST" if body else "GET"
        length = f"content-length: {len(body)}\r\n" if body else ""
        request = f"{method} {path} HTTP/1.1\r\nhost: a\r\n{length}\r\n".encode() + body
        connection.sendall(request)
        sent += len(request)
        answer = b""
        while True:
            piece = connection.recv(65536)
            if not piece:
                raise SystemExit("the server closed")
            answer += piece
            header, end, rest = answer.partition(b"\r\n\r\n")
            if not end:
                continue
            if b"chunked" in header.lower():
                if rest.endswith(b"0\r\n\r\n"):
                    break
            elif len(rest) == int(header.lower().split(b"content-length: ")[1].split(b"\r\n")[0]):
                break
        got += len(answer)
    connection.unwrap().close()
    print(sent, got)


if __name__ == "__main__":
    main()
