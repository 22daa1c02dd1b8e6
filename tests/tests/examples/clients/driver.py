"""Executes requests of a test, one JSON object per line, with the Python client. Keys and values
are hexadecimal, so that they can be any bytes."""

import json
import socket
import sys
import threading
import time

import statehouse
from statehouse import (
    Change,
    DeniedError,
    LockLost,
    ProtocolError,
    RefusedError,
    RequestTimeout,
    Store,
    StoreError,
    TransportError,
    Version,
    connect,
)

CODES: dict[type[StoreError], str] = {
    DeniedError: "denied",
    LockLost: "lock-lost",
    ProtocolError: "protocol",
    RefusedError: "refused",
    RequestTimeout: "timeout",
    TransportError: "transport",
}


WALL_NS = time.time_ns


class Driver:
    store: Store

    def connect(
        self,
        url,
        user=None,
        password=None,
        ca=None,
        client_id=None,
        timeout_ms=5000,
        in_flight=statehouse.IN_FLIGHT_MAX,
    ):
        statehouse.IN_FLIGHT_MAX = in_flight
        self.store = connect(
            url, user=user, password=password, ca=ca, client_id=client_id, timeout=timeout_ms / 1000
        )
        self.watches, self.locks = {}, {}

    def get(self, key):
        value = self.store.get(bytes.fromhex(key))
        return value and {"data": value.data.hex(), "version": str(value.version)}

    def set(self, key, value, nx=False, nex=False, if_version=None, ttl_ms=None, token=None):
        result = self.store.set(
            bytes.fromhex(key),
            bytes.fromhex(value),
            nx=nx,
            nex=nex,
            if_version=version(if_version),
            ttl=ttl_ms and ttl_ms / 1000,
            fencing_token=version(token),
        )
        return {"applied": result.applied, "version": text(result.version)}

    def delete(self, key, token=None):
        return text(self.store.delete(bytes.fromhex(key), fencing_token=version(token)))

    def vdelete(self, key, value, token=None):
        key, value = bytes.fromhex(key), bytes.fromhex(value)
        result = self.store.vdelete(key, value, fencing_token=version(token))
        return {"deleted": result.deleted, "version": text(result.version)}

    def scan(self, pattern):
        return [key.hex() for key in self.store.scan(bytes.fromhex(pattern))]

    def watch(self, key):
        self.watches[key] = self.store.watch(bytes.fromhex(key))

    def next(self, key, timeout_ms):
        event = self.watches[key].next(timeout_ms / 1000)
        if isinstance(event, Change):
            return {"data": event.data if event.data is None else event.data.hex()}
        return event and {"gap": event.cause}

    def unwatch(self, key):
        self.watches.pop(key).close()

    def replace_watch(self, key):
        """Closes a watch. Another thread begins one of the same key just before the STOP."""
        request, begun = self.store._request, threading.Event()

        def begin():
            self.watches[key] = self.store.watch(bytes.fromhex(key))
            begun.set()

        other = threading.Thread(target=begin)

        def delayed(arguments, fencing_token):
            if b"STOP" in arguments:
                other.start()
                # A client that sends both in order lets the other watch wait for the STOP.
                begun.wait(0.5)
            return request(arguments, fencing_token)

        earlier = self.watches.pop(key)
        self.store._request = delayed
        earlier.close()
        other.join()
        self.store._request = request

    def lock(self, name, lease_ms, wait_ms):
        try:
            lock = self.store.lock(name, lease=lease_ms / 1000, wait=wait_ms / 1000)
        except TimeoutError:
            return None
        self.locks[name] = lock
        return str(lock.fencing_token)

    def held(self, name):
        return self.locks[name].held

    def suspend(self, ms):
        """The clock that counts suspensions jumps ahead."""
        clock_gettime = time.clock_gettime
        time.clock_gettime = lambda clock: clock_gettime(clock) + ms / 1000

    def wall(self, ahead_ms):
        """The wall clock is set this far ahead of the right time."""
        time.time_ns = lambda: WALL_NS() + ahead_ms * 1_000_000

    def release(self, name):
        return self.locks.pop(name).release()

    def nodelay(self):
        """Whether the socket sends without waiting for acknowledgements."""
        sock = self.store._mqtt.socket()
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0

    def close(self):
        self.store.close()


def version(given):
    return None if given is None else Version.parse(given)


def text(given):
    return None if given is None else str(given)


driver = Driver()
for line in sys.stdin:
    request = json.loads(line)
    try:
        answer = {"ok": getattr(driver, request.pop("do"))(**request)}
    except StoreError as error:
        answer = {"error": CODES[type(error)], "text": str(error)}
    print(json.dumps(answer), flush=True)
