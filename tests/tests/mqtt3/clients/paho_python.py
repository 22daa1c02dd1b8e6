"""paho for Python with MQTT 3.1.1. Arguments: host, port, prefix of topics, and the part."""

import queue
import sys
import time

import paho.mqtt.client as mqtt

host, port, prefix, part = sys.argv[1:]
connected, subscribed, received = queue.Queue(), queue.Queue(), queue.Queue()


def topic(name):
    return f"{prefix}/{name}"


def connect():
    """Connects with the lasting session. Returns the client, and whether the session existed."""
    client = mqtt.Client(
        mqtt.CallbackAPIVersion.VERSION2,
        client_id=f"{prefix}-client",
        clean_session=False,
        protocol=mqtt.MQTTv311,
    )
    client.on_connect = lambda _client, _data, flags, reason, _: connected.put((flags, reason))
    client.on_subscribe = lambda _client, _data, _id, reasons, _: subscribed.put(reasons)
    client.on_message = lambda _client, _data, message: received.put(message)
    client.will_set(topic("will"), b"died", qos=1, retain=True)
    client.connect(host, int(port), keepalive=30)
    client.loop_start()
    flags, reason = connected.get(timeout=20)
    assert reason == 0, reason
    return client, flags.session_present


def subscribe(client, *filters):
    client.subscribe(list(filters))
    assert [it.value for it in subscribed.get(timeout=20)] == [qos for _, qos in filters]


def publish(client, name, payload, qos, retain=False):
    published = client.publish(topic(name), payload, qos=qos, retain=retain)
    published.wait_for_publish(20)
    assert published.is_published()


def expect(name, payload, qos, retain=False):
    message = received.get(timeout=20)
    got = (message.topic, message.payload, message.qos, message.retain)
    assert got == (topic(name), payload, qos, retain), got


client, resumed = connect()
if part == "first":
    assert not resumed
    subscribe(client, *[(topic(f"q{qos}"), qos) for qos in range(3)])
    for qos in range(3):
        publish(client, f"q{qos}", b"hello", qos)
        expect(f"q{qos}", b"hello", qos)
    publish(client, "retained", b"kept", 1, retain=True)
    subscribe(client, (topic("retained"), 2))
    expect("retained", b"kept", 1, retain=True)
    client.disconnect()
    client.loop_stop()
    client, resumed = connect()
    assert resumed
    publish(client, "q1", b"again", 1)
    expect("q1", b"again", 1)
    print("ready", flush=True)
    time.sleep(60)
else:
    assert resumed
    expect("q1", b"queued 1", 1)
    expect("q2", b"queued 2", 2)
    subscribe(client, (topic("will"), 1))
    expect("will", b"died", 1, retain=True)
    client.disconnect()
    client.loop_stop()
    assert received.empty()
    print("done")
