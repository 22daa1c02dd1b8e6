"""A client of the Statehouse state store: MQTT 5 by paho-mqtt 2, one file, for threads.

    with connect("mqtt://127.0.0.1:1883") as store:
        store.set("room/temperature", "21.5", ttl=60)
        value = store.get("room/temperature")

paho resends a request after a reconnect with its packet id and its correlation data, so the store
recognizes the duplicate. If the broker lost the session, this client resends the requests that the
broker had acknowledged. Behind a foreign broker the store recognizes these too. A store that is the
broker recognizes duplicates within one session only, so the session outlives each request. If it
ends earlier, for example by an operator, that store executes a resent request again.

Paho runs in a thread of its own, and no code here may call it while it holds `_mutex`: paho calls
back with locks of its own.
"""

from __future__ import annotations

import itertools
import math
import secrets
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Iterator, Union
from urllib.parse import unquote, urlsplit

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

REQUESTS = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke"
NOTIFICATIONS = "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8"

UNACKNOWLEDGED_MAX = 1024
"""Requests that the store has not acknowledged, abandoned ones included."""
IN_FLIGHT_MAX = 64
"""Unacknowledged packets on the wire. The store takes 1024 by default, and paho cannot follow a
broker that announces fewer."""
WATCH_EVENTS_MAX = 1024
"""Events that a watch buffers for a slow reader before it reports a gap."""
WATCH_BYTES_MAX = 16 << 20
"""Bytes of values that a watch buffers for a slow reader before it reports a gap."""
MQTT_PACKET_BYTES_MAX = 268_435_460
"""The largest packet that MQTT can express."""
PACKET_BYTES_MAX = 4 << 20
"""The largest packet that is accepted."""
RESP_DEPTH_MAX = 16
"""Arrays within arrays in a response."""
CLOCK_AHEAD_MS_MAX = 60_000
"""How far in the future a version may be and still move the clock; the store refuses later ones."""
COUNTER_MAX = (1 << 31) - 2
"""The largest counter of a version that all clients can read."""
CLIENT_ID_BYTES_MAX = 1024
"""The client id and a key in hexadecimal must fit a topic."""
SESSION_EXPIRY_S = 60
"""How long the store keeps the session without a connection, unless a request has more time."""
RECONNECT_PAUSE_MAX_S = 2
"""The longest pause between two attempts to connect."""
LOCK_RETRY_MIN_S = 0.1
"""The shortest pause before a held lock is tried again without a notification."""
LOCK_LEASE_LEFT_DIVISOR = 3
"""A lock counts as acquired only if this part of its lease is left."""
REGISTER_PAUSE_S = 0.5
"""The pause before a watch is registered once more, after a failure that passes."""

NO_MATCHING_SUBSCRIBERS = 0x10
PROTOCOL_ERROR = 0x82
SESSION_TAKEN_OVER = 0x8E
QUOTA_EXCEEDED = 0x97

Text = Union[str, bytes]
Reply = Union[str, int, bytes, None, "list[Reply]"]


class StoreError(Exception):
    """Why a request has no result."""


class RefusedError(StoreError):
    """The store answered with this error; nothing changed."""


class DeniedError(StoreError):
    """The broker refused the connection, a subscription or a request. `passes` is true if a later
    request may succeed: a limit of the broker, such as that of the requests per second, refused
    this one, or no store is connected to the broker yet."""

    def __init__(self, why: str, passes: bool = False) -> None:
        super().__init__(why)
        self.passes = passes


class TransportError(StoreError):
    """There is no connection."""


class RequestTimeout(StoreError):
    """No response in time. It is unknown whether the request took effect."""


class ProtocolError(StoreError):
    """The response does not follow the protocol."""


class LockLost(StoreError):
    """The lease of a lock expired, so another client may hold the lock."""


@dataclass(frozen=True, order=True)
class Version:
    """A version of a value, or a fencing token: a reading of a hybrid logical clock."""

    wall_ms: int
    counter: int
    node: str

    @staticmethod
    def parse(text: str) -> Version:
        """Parses `wall:counter:node`, with or without padding."""
        wall, counter, node = (text.split(":") + ["", ""])[:3]
        if not (wall + counter).isascii() or not wall.isdigit() or not counter.isdigit():
            raise ProtocolError(f"{text[:64]!r} is not a version")
        if not node or text.count(":") != 2 or len(wall) > 20 or len(counter) > 10:
            raise ProtocolError(f"{text[:64]!r} is not a version")
        return Version(int(wall), int(counter), node)

    def __str__(self) -> str:
        return f"{self.wall_ms:015}:{self.counter:05}:{self.node}"


@dataclass(frozen=True)
class Value:
    """A value and its version."""

    data: bytes
    version: Version


@dataclass(frozen=True)
class SetResult:
    """`applied` is false if a condition did not hold. `version` is that of the value that the key
    has now; it is None only if `if_version` was given and the key does not exist."""

    applied: bool
    version: Version | None


@dataclass(frozen=True)
class VdelResult:
    """`version` is that of the deleted value or of the other value; None if there is no key."""

    deleted: bool
    version: Version | None


@dataclass(frozen=True)
class Change:
    """A change of a watched key. `data` is None if the key was deleted or expired."""

    data: bytes | None
    version: Version


@dataclass(frozen=True)
class Gap:
    """Changes before this point may be missing. `get` returns the current value."""

    cause: str


Event = Union[Change, Gap]


@dataclass(frozen=True)
class _Response:
    reply: Reply
    version: Version | None

    def stamped(self) -> Version:
        if self.version is None:
            raise ProtocolError("the response has no version")
        return self.version


@dataclass(eq=False)
class _Request:
    correlation: bytes
    payload: bytearray
    properties: Properties
    deadline: float
    acknowledged: bool = False
    done: Future[_Response] = field(default_factory=Future)

    def finish(self, response: _Response) -> None:
        # The first result counts: another thread may fail the request at the same time.
        with suppress(InvalidStateError):
            self.done.set_result(response)

    def fail(self, error: StoreError) -> None:
        with suppress(InvalidStateError):
            self.done.set_exception(error)

    def abandon(self) -> None:
        """It must not take effect any more. Paho packs a request when it sends it, so this also
        changes one that waits in its queue. The store drops an expired request. Brokers such as
        Mosquitto 2.0 take an expiry of 0 for none, so the command is erased too."""
        self.properties.MessageExpiryInterval = 0
        self.payload[:] = bytes(len(self.payload))

    def shrink(self) -> None:
        """The broker must take it when paho resends it. Only for paho's thread, between two
        connections: another thread may pack the request at other times."""
        self.abandon()
        del self.payload[:]


class _Clock:
    """The hybrid logical clock of this client. Its readings must always rise, unless the wall clock
    is set back by more than a minute: the store would refuse higher ones."""

    def __init__(self, node: str) -> None:
        self._node = node.replace(":", "_")
        self._last = (0, 0)

    def read(self) -> str:
        wall, counter = self._last
        now = time.time_ns() // 1_000_000
        if now > wall or wall > now + CLOCK_AHEAD_MS_MAX:
            self._last = (now, 0)
        else:
            self._last = (wall, counter + 1) if counter < COUNTER_MAX else (wall + 1, 0)
        return str(Version(*self._last, self._node))

    def observe(self, version: Version) -> None:
        ahead = version.wall_ms - time.time_ns() // 1_000_000
        if ahead <= CLOCK_AHEAD_MS_MAX and version.counter <= COUNTER_MAX:
            self._last = max(self._last, (version.wall_ms, version.counter))


class Watch:
    """The changes of one key, an iterator that waits. It ends with `close`. After a reconnect the
    client registers the watch again and reports a `Gap`."""

    def __init__(self, store: Store, key: bytes) -> None:
        self.key = key
        self._store = store
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._bytes = 0
        self._last: Version | None = None
        self._end: StoreError | None = None
        self._closed = False

    def next(self, timeout: float | None = None) -> Event | None:
        """The next event; None after this time in seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._end or self._closed, timeout)
            if self._events:
                event = self._events.popleft()
                self._bytes -= _size(event)
                return event
            if self._end:
                raise self._end
            return None

    def close(self) -> None:
        """Ends the watch."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._store._unwatch(self)

    def __iter__(self) -> Iterator[Event]:
        while (event := self.next()) is not None:
            yield event

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, event: Event, dup: bool = False) -> None:
        with self._changed:
            if isinstance(event, Change):
                # A packet that is sent again may be here already.
                if dup and self._last is not None and event.version <= self._last:
                    return
                self._last = event.version
            full = len(self._events) >= WATCH_EVENTS_MAX
            if full or self._bytes + _size(event) > WATCH_BYTES_MAX:
                event = Gap("the reader was too slow")
                if self._events and self._events[-1] == event:
                    return
            self._bytes += _size(event)
            self._events.append(event)
            self._changed.notify_all()

    def _fail(self, error: StoreError) -> None:
        with self._changed:
            self._end = self._end or error
            self._changed.notify_all()


class Lock:
    """A held lock, from `Store.lock`, renewed in the background until `release`. As a context
    manager it raises `LockLost` at its end if the lock was lost."""

    def __init__(self, store: Store, name: bytes, holder: bytes, lease: float) -> None:
        self.name = name
        self.holder = holder
        self.fencing_token: Version
        """Above that of every earlier holder. Pass it to `set`, `delete` and `vdelete` of the data
        that the lock protects: the store then refuses a holder that lost the lock."""
        self._store = store
        self._lease = lease
        self._held_until = 0.0
        self._stop = threading.Event()
        self._renewal = threading.Thread(target=self._renew, daemon=True)

    @property
    def held(self) -> bool:
        """Whether the lease has not expired. A lock that may be lost is not reported as held. Only
        on Linux this holds after the machine was suspended: other systems lack CLOCK_BOOTTIME."""
        return _lease_clock() < self._held_until

    def release(self) -> bool:
        """Releases the lock. Returns false if it was not held any more."""
        self._stop.set()
        if self._renewal.is_alive():
            self._renewal.join()
        held = self.held
        self._held_until = 0.0
        return self._store.vdelete(self.name, self.holder).deleted and held

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if not self.release() and kind is None:
            raise LockLost(f"the lock {self.name!r} was lost before its release")

    def _acquire(self) -> bool:
        """One attempt. True if enough of the lease is left to renew it."""
        asked_at = _lease_clock()
        result = self._store.set(self.name, self.holder, nex=True, ttl=self._lease)
        left = asked_at + self._lease - _lease_clock()
        if not result.applied or left < self._lease / LOCK_LEASE_LEFT_DIVISOR:
            return False
        assert result.version is not None
        self.fencing_token = result.version
        self._held_until = asked_at + self._lease
        self._renewal.start()
        return True

    def _renew(self) -> None:
        while not self._stop.wait(self._lease / LOCK_LEASE_LEFT_DIVISOR) and self.held:
            asked_at = _lease_clock()
            try:
                result = self._store.set(self.name, self.holder, nex=True, ttl=self._lease)
            except StoreError as error:
                # The lease goes on, so there is time to try again.
                if _passes(error):
                    continue
                result = SetResult(False, None)
            # A lease that expired before the response may have been another client's.
            if not result.applied or not self.held:
                self._held_until = 0.0
                return
            self._held_until = asked_at + self._lease


class Store:
    """A connection to a state store, from `connect`. Any thread may use it."""

    def __init__(self, client_id: str, timeout: float) -> None:
        self.client_id = client_id
        self.timeout = timeout
        self._mutex = threading.RLock()
        # Held while a KEYNOTIFY or its STOP is passed to paho: the STOP of an earlier watch must
        # not follow the registration of a later one. No callback of paho may take it.
        self._registering = threading.Lock()
        self._clock = _Clock(client_id)
        self._answers = f"clients/{client_id}/services/statestore/_any_/command/invoke/response"
        self._notifications = f"{NOTIFICATIONS}/{_hex(client_id.encode())}/command/notify/"
        # The first half of all correlation data differs between processes with one client id.
        self._nonce = secrets.token_bytes(8)
        self._numbers = itertools.count(1)
        self._pending: dict[bytes, _Request] = {}
        self._unacknowledged: dict[int, _Request] = {}
        # A PUBACK can arrive before `publish` has returned the packet id.
        self._publishing = 0
        self._early: dict[int, ReasonCode] = {}
        self._watches: dict[bytes, list[Watch]] = {}
        self._connections = 0
        # Whether the broker has accepted the present connection.
        self._accepted = False
        # What the store accepts (MQTT 5 section 3.2.2.3.6).
        self._request_bytes_max = MQTT_PACKET_BYTES_MAX
        self._closed: StoreError | None = None
        self._ready: Future[None] = Future()
        self._mqtt = mqtt.Client(
            CallbackAPIVersion.VERSION2, client_id=client_id, protocol=mqtt.MQTTv5
        )

    def get(self, key: Text) -> Value | None:
        """The value of a key; None if it does not exist."""
        response = self._ask(b"GET", key)
        if response.reply is None:
            return None
        if not isinstance(response.reply, bytes):
            raise ProtocolError("a GET has another form of response")
        return Value(response.reply, response.stamped())

    def set(
        self,
        key: Text,
        value: Text,
        *,
        nx: bool = False,
        nex: bool = False,
        if_version: Version | None = None,
        ttl: float | None = None,
        fencing_token: Version | None = None,
    ) -> SetResult:
        """Sets a key: with `nx` only if it does not exist, with `nex` only if it does not exist or
        has this value, with `if_version` only if it has this version. `ttl` is in seconds."""
        if nx + nex + (if_version is not None) > 1:
            raise ValueError("nx, nex and if_version exclude each other")
        arguments: list[Text] = [b"SET", key, value]
        if nx:
            arguments.append(b"NX")
        if nex:
            arguments.append(b"NEX")
        if if_version is not None:
            arguments += [b"IFVERSION", str(if_version)]
        if ttl is not None:
            if ttl < 0.001:
                raise ValueError(f"ttl is {ttl} s; the shortest is 0.001 s")
            arguments += [b"PX", str(round(ttl * 1000))]
        response = self._ask(*arguments, fencing_token=fencing_token)
        if response.reply == "OK":
            return SetResult(True, response.stamped())
        if response.reply == -1:
            absent = if_version is not None and response.version is None
            return SetResult(False, None if absent else response.stamped())
        raise ProtocolError("a SET has another form of response")

    def delete(self, key: Text, *, fencing_token: Version | None = None) -> Version | None:
        """Deletes a key. Returns the version of the deleted value; None if there was none."""
        response = self._ask(b"DEL", key, fencing_token=fencing_token)
        if response.reply not in (0, 1):
            raise ProtocolError("a DEL has another form of response")
        return response.stamped() if response.reply == 1 else None

    def vdelete(
        self, key: Text, value: Text, *, fencing_token: Version | None = None
    ) -> VdelResult:
        """Deletes a key if it has this value."""
        response = self._ask(b"VDEL", key, value, fencing_token=fencing_token)
        if response.reply not in (-1, 0, 1):
            raise ProtocolError("a VDEL has another form of response")
        version = None if response.reply == 0 else response.stamped()
        return VdelResult(response.reply == 1, version)

    def scan(self, pattern: Text) -> Iterator[bytes]:
        """The keys that match a glob of `*`, `?`, `[a-z]`, `[!a-z]` and `\\` escapes."""
        token: bytes | None = None
        while True:
            following: bytes | None = None
            match self._ask(b"SCAN", pattern, *([] if token is None else [token])).reply:
                case [list(keys)]:
                    pass
                case [list(keys), bytes(after)] if after != token:
                    following = after
                case _:
                    raise ProtocolError("a SCAN has another form of response")
            for key in keys:
                if not isinstance(key, bytes):
                    raise ProtocolError("a SCAN lists something that is no key")
                yield key
            if following is None:
                return
            token = following

    def watch(self, key: Text) -> Watch:
        """Watches a key. The watch is registered when this returns."""
        watch = Watch(self, _bytes(key))
        request = self._request((b"KEYNOTIFY", watch.key), None)
        try:
            with self._registering:
                # Before the request, so that no notification is missed.
                with self._mutex:
                    self._watches.setdefault(watch.key, []).append(watch)
                self._send(request)
            self._response(request)
        except BaseException:
            watch.close()
            raise
        return watch

    def lock(
        self,
        name: Text,
        *,
        lease: float = 10,
        wait: float | None = None,
        holder: Text | None = None,
    ) -> Lock:
        """Acquires a lock; waits while another holder has it, at most `wait` seconds, and then
        raises `TimeoutError`. After any error the lock may be held until its lease expires."""
        if holder is None:
            # Threads of one client exclude each other.
            holder = f"{self.client_id}/{secrets.token_hex(4)}"
        give_up = None if wait is None else time.monotonic() + wait
        # The watch precedes the SET, so that a release between the two is noticed.
        with self.watch(name) as watch:
            while True:
                lock = Lock(self, _bytes(name), _bytes(holder), lease)
                if lock._acquire():
                    return lock
                retry = time.monotonic() + max(lease, LOCK_RETRY_MIN_S)
                if give_up is not None:
                    if time.monotonic() >= give_up:
                        raise TimeoutError(f"another client holds the lock {name!r}")
                    retry = min(retry, give_up)
                # The pause covers a notification that is lost.
                while (left := retry - time.monotonic()) > 0:
                    event = watch.next(left)
                    if isinstance(event, Gap) or (event is not None and event.data is None):
                        break

    def close(self) -> None:
        """Disconnects. Pending requests fail."""
        self._close(TransportError("the client was closed"))
        self._mqtt.loop_stop()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, *arguments: Text, fencing_token: Version | None = None) -> _Response:
        request = self._request(arguments, fencing_token)
        self._send(request)
        return self._response(request)

    def _response(self, request: _Request) -> _Response:
        """Waits for the response to a request that paho has."""
        try:
            return request.done.result(max(0.0, request.deadline - time.monotonic()))
        except TimeoutError:
            if not self._mqtt.is_connected():
                raise TransportError("the connection to the store is lost") from None
            raise RequestTimeout(f"no response within {self.timeout} s") from None
        finally:
            if not request.done.done():
                request.abandon()
            with self._mutex:
                self._pending.pop(request.correlation, None)

    def _request(self, arguments: tuple[Text, ...], fencing_token: Version | None) -> _Request:
        properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        properties.ResponseTopic = self._answers
        properties.MessageExpiryInterval = max(1, math.ceil(self.timeout))
        with self._mutex:
            number = next(self._numbers)
            user = [("__protVer", "1.0"), ("__ts", self._clock.read()), ("__srcId", self.client_id)]
        if fencing_token is not None:
            user.append(("__ft", str(fencing_token)))
        properties.UserProperty = user
        correlation = self._nonce + number.to_bytes(8, "big")
        properties.CorrelationData = correlation
        deadline = time.monotonic() + self.timeout
        return _Request(correlation, bytearray(_command(arguments)), properties, deadline)

    def _send(self, request: _Request) -> None:
        # A connection that sends more is closed, and paho would send it again on the next one.
        head = 5 + 2 + len(REQUESTS) + 2
        properties = request.properties.pack()  # type: ignore[no-untyped-call]
        size = head + len(properties) + len(request.payload)
        if size > self._request_bytes_max:
            most = self._request_bytes_max
            raise DeniedError(f"the request has {size} bytes, and the store takes {most}")
        with self._mutex:
            if self._closed:
                raise self._closed
            self._pending[request.correlation] = request
        self._publish(request)

    def _publish(self, request: _Request) -> None:
        with self._mutex:
            request.acknowledged = False
            self._publishing += 1
        sent = None
        try:
            sent = self._mqtt.publish(
                REQUESTS, request.payload, qos=1, properties=request.properties
            )
        finally:
            with self._mutex:
                self._publishing -= 1
                reason = self._early.pop(sent.mid, None) if sent else None
                if not self._publishing:
                    self._early.clear()
                if sent and sent.rc != MQTTErrorCode.MQTT_ERR_QUEUE_SIZE and reason is None:
                    self._unacknowledged[sent.mid] = request
                request.acknowledged = reason is not None
        if sent.rc == MQTTErrorCode.MQTT_ERR_QUEUE_SIZE:
            with self._mutex:
                self._pending.pop(request.correlation, None)
            raise TransportError(f"{UNACKNOWLEDGED_MAX} requests are not acknowledged")
        if reason is not None:
            _reject(request, reason)

    def _connect(self, host: str, port: int, clean_start: bool) -> None:
        client = self._mqtt
        client.on_socket_open = self._opened
        client.on_pre_connect = self._before_connection
        client.on_connect = self._connected
        client.on_subscribe = self._subscribed
        client.on_disconnect = self._disconnected
        client.on_publish = self._acknowledged
        client.on_message = self._message
        client.max_inflight_messages_set(IN_FLIGHT_MAX)
        client.max_queued_messages_set(UNACKNOWLEDGED_MAX)
        client.reconnect_delay_set(1, RECONNECT_PAUSE_MAX_S)
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = max(SESSION_EXPIRY_S, math.ceil(self.timeout))
        properties.MaximumPacketSize = PACKET_BYTES_MAX
        try:
            # Mosquitto 2.0 does not save a session whose last connection began with Clean Start.
            start = mqtt.MQTT_CLEAN_START_FIRST_ONLY if clean_start else False
            client.connect(host, port, keepalive=15, clean_start=start, properties=properties)
            client.loop_start()
            self._ready.result(self.timeout)
        except OSError as error:
            self.close()
            # TimeoutError is an OSError.
            why = str(error) or f"no answer within {self.timeout} s"
            raise TransportError(f"cannot reach a store at {host}:{port}: {why}") from error
        except StoreError:
            self.close()
            raise

    def _opened(self, _client: mqtt.Client, _data: object, sock: object) -> None:
        """Requests must not wait until the broker has acknowledged earlier packets (Nagle). The
        class that paho wraps around a WebSocket has no options."""
        if isinstance(sock, socket.socket):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _before_connection(self, _client: mqtt.Client, _data: object) -> None:
        """paho resends what is not acknowledged, and `_resend` the rest."""
        self._accepted = False
        now = time.monotonic()
        with self._mutex:
            for request in [*self._unacknowledged.values(), *self._pending.values()]:
                left = math.ceil(request.deadline - now)
                if left > 0:
                    request.properties.MessageExpiryInterval = left
                else:
                    request.abandon()

    def _connected(
        self,
        client: mqtt.Client,
        _data: object,
        flags: mqtt.ConnectFlags,
        reason: ReasonCode,
        properties: Properties | None,
    ) -> None:
        most = getattr(properties, "MaximumPacketSize", None)
        self._request_bytes_max = most or MQTT_PACKET_BYTES_MAX
        if reason.is_failure:
            # A store that refuses a later connection may accept the next one.
            if not self._ready.done():
                self._close(DeniedError(f"the store refused the connection: {reason}"))
            return
        self._accepted = True
        filters = [self._answers, f"{self._notifications}+"]
        client.subscribe([(filter, SubscribeOptions(qos=1)) for filter in filters])
        with self._mutex:
            self._connections += 1
            keys = list(self._watches) if self._connections > 1 else []
            connection = self._connections
        if not flags.session_present:
            self._resend()
        self._register(keys, connection)

    def _resend(self) -> None:
        """The broker lost the session and so the responses to requests that it acknowledged. Behind
        a foreign broker the store recognizes a duplicate by its correlation data and its timestamp.
        A store that is the broker executes it again."""
        with self._mutex:
            pending = list(self._pending.values())
        for request in (it for it in pending if it.acknowledged and not it.done.done()):
            try:
                self._publish(request)
            except StoreError as error:
                request.fail(error)

    def _register(self, keys: list[bytes], connection: int) -> None:
        """Registers watches again, one after the other: registrations end with their connection."""
        with self._mutex:
            # A later connection registers all watches itself.
            is_over = connection != self._connections or self._closed is not None
            keys = [key for key in keys if key in self._watches]
        if is_over or not keys:
            return
        key, later = keys[0], keys[1:]
        request = self._request((b"KEYNOTIFY", key), None)
        late = RequestTimeout(f"no response within {self.timeout} s")
        timer = threading.Timer(self.timeout, request.fail, [late])
        timer.daemon = True

        def registered(done: Future[_Response]) -> None:
            timer.cancel()
            error = done.exception()
            with self._mutex:
                self._pending.pop(request.correlation, None)
            if isinstance(error, RequestTimeout):
                self._register(keys, connection)
            elif isinstance(error, DeniedError) and error.passes:
                self._register_later(keys, connection)
            else:
                self._registered(key, error)
                self._register(later, connection)

        try:
            self._send(request)
        except TransportError:
            # As many requests as possible are not acknowledged, or the client was closed.
            self._register_later(keys, connection)
        except StoreError as error:
            self._registered(key, error)
            self._register(later, connection)
        else:
            timer.start()
            request.done.add_done_callback(registered)
            return
        with self._mutex:
            self._pending.pop(request.correlation, None)

    def _register_later(self, keys: list[bytes], connection: int) -> None:
        timer = threading.Timer(REGISTER_PAUSE_S, self._register, [keys, connection])
        timer.daemon = True
        timer.start()

    def _registered(self, key: bytes, error: BaseException | None) -> None:
        with self._mutex:
            watches = list(self._watches.get(key, ()))
        for watch in watches:
            if error is None:
                watch._add(Gap("the connection was lost"))
            elif isinstance(error, StoreError):
                watch._fail(error)

    def _subscribed(
        self,
        _client: mqtt.Client,
        _data: object,
        _mid: int,
        reasons: list[ReasonCode],
        _properties: Properties | None,
    ) -> None:
        refused = next((reason for reason in reasons if reason.is_failure), None)
        if refused is not None:
            self._close(DeniedError(f"the store refused a subscription: {refused}"))
        elif not self._ready.done():
            self._ready.set_result(None)

    def _disconnected(
        self,
        _client: mqtt.Client,
        _data: object,
        flags: mqtt.DisconnectFlags,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        if reason.value == SESSION_TAKEN_OVER:
            # To connect again would end the other client's connection.
            self._close(TransportError("another client connected with the same client id"))
        elif reason.value == PROTOCOL_ERROR and not flags.is_disconnect_packet_from_server:
            if self._accepted:
                self._unreadable()

    def _unreadable(self) -> None:
        """paho could not read a packet. It knows no PUBACK with the reason 0x95, which Mosquitto
        sends for a payload above its `message_size_limit`, and would resend the request for ever.
        Brokers acknowledge in order (MQTT 5 section 4.6), so this is about the oldest request."""
        with self._mutex:
            request = next(iter(self._unacknowledged.values()), None)
        if request is not None:
            request.shrink()
            why = "the broker probably refused the request as too large (message_size_limit)"
            request.fail(DeniedError(why))

    def _acknowledged(
        self,
        _client: mqtt.Client,
        _data: object,
        mid: int,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        with self._mutex:
            request = self._unacknowledged.pop(mid, None)
            if request is not None:
                request.acknowledged = True
            elif self._publishing:
                self._early[mid] = reason
        if request is not None:
            _reject(request, reason)

    def _message(self, _client: mqtt.Client, _data: object, message: mqtt.MQTTMessage) -> None:
        if message.topic == self._answers:
            self._answer(message)
        elif message.topic.startswith(self._notifications):
            self._notification(message)

    def _answer(self, message: mqtt.MQTTMessage) -> None:
        correlation = getattr(message.properties, "CorrelationData", b"")
        with self._mutex:
            request = self._pending.pop(correlation, None)
        if request is None or request.done.done():
            return
        user = dict(reversed(getattr(message.properties, "UserProperty", [])))
        try:
            if user.get("__stat") != "200":
                raise ProtocolError(f"the response has __stat {user.get('__stat')!r:.32}")
            version = self._observed(user)
            request.finish(_Response(parse(bytes(message.payload)), version))
        except StoreError as error:
            request.fail(error)

    def _notification(self, message: mqtt.MQTTMessage) -> None:
        user = dict(reversed(getattr(message.properties, "UserProperty", [])))
        try:
            key = bytes.fromhex(message.topic[len(self._notifications) :])
        except ValueError:
            return
        event: Event = Gap("a notification is unreadable")
        with suppress(StoreError):
            version = self._observed(user)
            match parse(bytes(message.payload)):
                case [b"NOTIFY", b"SET", b"VALUE", bytes(data)] if version:
                    event = Change(data, version)
                case [b"NOTIFY", b"DELETE"] if version:
                    event = Change(None, version)
        with self._mutex:
            watches = list(self._watches.get(key, ()))
        for watch in watches:
            watch._add(event, message.dup)

    def _observed(self, user: dict[str, str]) -> Version | None:
        if "__ts" not in user:
            return None
        version = Version.parse(user["__ts"])
        with self._mutex:
            self._clock.observe(version)
        return version

    def _unwatch(self, watch: Watch) -> None:
        with self._registering:
            with self._mutex:
                watches = self._watches.get(watch.key, [])
                if watch in watches:
                    watches.remove(watch)
                last = watch.key in self._watches and not watches
                if last:
                    del self._watches[watch.key]
            # Registrations end with their connection.
            if last and self._mqtt.is_connected():
                request = self._request((b"KEYNOTIFY", watch.key, b"STOP"), None)
                # A later connection must not send it after the registration of another watch.
                request.deadline = 0.0
                with suppress(StoreError):
                    self._send(request)
                # No code needs the response.
                with self._mutex:
                    self._pending.pop(request.correlation, None)

    def _close(self, why: StoreError) -> None:
        with self._mutex:
            if self._closed:
                return
            self._closed = why
            pending = list(self._pending.values())
            watches = [watch for watches in self._watches.values() for watch in watches]
        if not self._ready.done():
            self._ready.set_exception(why)
        for request in pending:
            request.fail(why)
        for watch in watches:
            watch._fail(why)
        self._mqtt.disconnect()


def connect(
    url: str,
    *,
    user: str | None = None,
    password: str | None = None,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
    client_id: str | None = None,
    timeout: float = 5,
) -> Store:
    """Connects to `mqtt://HOST:PORT`, `mqtts://…`, `ws://HOST:PORT/PATH` or `wss://…`. `ca`,
    `certificate` and `key` are PEM files; without `ca` those of the system count. Two running
    clients must not share a client id. The timeout in seconds is that of each request."""
    ports = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
    # The URL may contain a password, and the errors of urllib repeat parts of it.
    wrong = ValueError("the URL has not the form mqtt://HOST:PORT, mqtts, ws or wss")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ports or not parts.hostname:
        raise wrong
    # A session of an earlier process would bring its notifications.
    clean_start = client_id is not None
    if client_id is None:
        client_id = f"statehouse-{secrets.token_hex(8)}"
    is_topic_level = client_id.isprintable() and not set("+#") & set(client_id)
    if not 0 < len(client_id.encode()) <= CLIENT_ID_BYTES_MAX or not is_topic_level:
        rule = "and no '+', '#' or control character"
        raise ValueError(f"a client id has 1 to {CLIENT_ID_BYTES_MAX} bytes {rule}")
    store = Store(client_id, timeout)
    if parts.scheme in ("ws", "wss"):
        store._mqtt = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            protocol=mqtt.MQTTv5,
            transport="websockets",
        )
        store._mqtt.ws_set_options(path=parts.path or "/mqtt")
    if parts.scheme in ("mqtts", "wss"):
        store._mqtt.tls_set(ca_certs=ca, certfile=certificate, keyfile=key)
    name = user if user is not None else parts.username and unquote(parts.username)
    if name is not None:
        secret = password if password is not None else unquote(parts.password or "")
        store._mqtt.username_pw_set(name, secret)
    store._connect(parts.hostname, port or ports[parts.scheme], clean_start)
    return store


def parse(payload: bytes) -> Reply:
    """Parses one RESP value. Raises `RefusedError` for an error of the store."""
    reply, rest = _parse(payload, 0, 0)
    if rest != len(payload):
        raise ProtocolError("bytes follow the response")
    return reply


def _parse(payload: bytes, at: int, depth: int) -> tuple[Reply, int]:
    end = payload.find(b"\r\n", at)
    if end < 0 or depth > RESP_DEPTH_MAX:
        raise ProtocolError("the response is cut off or too deep")
    kind, line, at = payload[at : at + 1], payload[at + 1 : end], end + 2
    if kind == b"-":
        raise RefusedError(line.removeprefix(b"ERR ").decode(errors="replace"))
    if kind == b"+":
        return line.decode(errors="replace"), at
    if not line.removeprefix(b"-").isdigit() or len(line) > 20:
        raise ProtocolError("the response has no number where one belongs")
    number = int(line)
    if kind == b":":
        return number, at
    if kind == b"$" and number == -1:
        return None, at
    if kind == b"$" and payload[at + number : at + number + 2] == b"\r\n" and number >= 0:
        return payload[at : at + number], at + number + 2
    if kind == b"*" and number >= 0:
        items: list[Reply] = []
        for _ in range(number):
            item, at = _parse(payload, at, depth + 1)
            items.append(item)
        return items, at
    raise ProtocolError("the response is not RESP")


def _command(arguments: tuple[Text, ...]) -> bytes:
    payload = b"*%d\r\n" % len(arguments)
    for argument in map(_bytes, arguments):
        payload += b"$%d\r\n%b\r\n" % (len(argument), argument)
    return payload


def _reject(request: _Request, reason: ReasonCode) -> None:
    if reason.value == NO_MATCHING_SUBSCRIBERS:
        request.fail(DeniedError("no state store is subscribed to requests", passes=True))
    elif reason.is_failure:
        passes = reason.value == QUOTA_EXCEEDED
        request.fail(DeniedError(f"the broker rejected the request: {reason}", passes))


def _passes(error: StoreError) -> bool:
    """Whether a later request may succeed."""
    if isinstance(error, DeniedError):
        return error.passes
    return isinstance(error, (RequestTimeout, TransportError))


def _lease_clock() -> float:
    """Seconds of a clock that counts the time that the machine was suspended, as the store's does.
    Where there is none, the clock stands still during a suspension."""
    clock: int | None = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def _size(event: Event) -> int:
    return len(event.data or b"") if isinstance(event, Change) else 0


def _bytes(text: Text) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _hex(data: bytes) -> str:
    return data.hex().upper()
