"""A small state store client on paho-mqtt. It sends requests at QoS 1 and 2, and watches a key."""

import queue
import sys
import time

import paho.mqtt.client as mqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

REQUESTS = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke"
NOTIFICATIONS = "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8"
CLIENT_ID = "paho-client"
ANSWERS = f"clients/{CLIENT_ID}/answers"

answers = queue.Queue()
notifications = queue.Queue()
subscribed = queue.Queue()


def on_connect(client, userdata, flags, reason, properties):
    assert reason == 0, reason
    client.subscribe(ANSWERS, qos=1)


def on_message(client, userdata, message):
    received = notifications if message.topic.startswith(NOTIFICATIONS) else answers
    received.put(message)


client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id=CLIENT_ID, protocol=mqtt.MQTTv5)
client.on_connect = on_connect
client.on_message = on_message
client.on_subscribe = lambda *arguments: subscribed.put(True)
client.connect("127.0.0.1", int(sys.argv[1]), keepalive=30)
client.loop_start()
subscribed.get(timeout=20)
asked = 0


def ask(*arguments, qos=1):
    """Sends one request. Returns the payload and the version of the answer."""
    global asked
    asked += 1
    payload = b"*%d\r\n" % len(arguments)
    for argument in arguments:
        payload += b"$%d\r\n%s\r\n" % (len(argument), argument)
    properties = Properties(PacketTypes.PUBLISH)
    properties.ResponseTopic = ANSWERS
    properties.CorrelationData = b"%d" % asked
    properties.UserProperty = [("__ts", f"{int(time.time() * 1000)}:0:{CLIENT_ID}"), ("__protVer", "1.0")]
    published = client.publish(REQUESTS, payload, qos=qos, properties=properties)
    published.wait_for_publish(20)
    assert published.is_published()
    message = answers.get(timeout=20)
    assert message.qos == 1 and not message.retain
    assert message.properties.CorrelationData == b"%d" % asked
    user = dict(message.properties.UserProperty)
    assert user["__stat"] == "200", user
    return message.payload, user.get("__ts")


for qos in (1, 2):
    written, version = ask(b"SET", b"paho", b"\x00\r\n\xff", qos=qos)
    assert written == b"+OK\r\n", written
    assert ask(b"GET", b"paho", qos=qos) == (b"$4\r\n\x00\r\n\xff\r\n", version)
assert ask(b"GET", b"missing") == (b"$-1\r\n", None)

assert ask(b"KEYNOTIFY", b"watched")[0] == b"+OK\r\n"
_, version = ask(b"SET", b"watched", b"v", b"PX", b"300")
message = notifications.get(timeout=20)
assert message.topic == f"{NOTIFICATIONS}/{CLIENT_ID.encode().hex().upper()}/command/notify/{b'watched'.hex().upper()}"
assert message.payload == b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n$1\r\nv\r\n", message.payload
assert dict(message.properties.UserProperty)["__ts"] == version
deletion = notifications.get(timeout=20)
assert deletion.payload == b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n", deletion.payload
assert answers.empty() and notifications.empty()

client.disconnect()
client.loop_stop()
print("every step done")
