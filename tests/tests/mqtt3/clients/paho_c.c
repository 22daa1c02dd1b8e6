/* paho for C with MQTT 3.1.1. Arguments: host, port, prefix of topics, and the part. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <MQTTClient.h>

enum { TIMEOUT_MS = 20000 };

static const char *prefix;

#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);            \
            exit(1);                                                           \
        }                                                                      \
    } while (0)

static char *topic(const char *name) {
    static char names[8][256];
    static int next;
    char *out = names[next++ % 8];
    snprintf(out, sizeof names[0], "%s/%s", prefix, name);
    return out;
}

/* Connects with the lasting session. Returns whether the session existed. */
static int connect_to(MQTTClient client) {
    MQTTClient_connectOptions options = MQTTClient_connectOptions_initializer;
    MQTTClient_willOptions will = MQTTClient_willOptions_initializer;
    will.topicName = topic("will");
    will.message = "died";
    will.qos = 1;
    will.retained = 1;
    options.will = &will;
    options.keepAliveInterval = 30;
    options.cleansession = 0;
    options.MQTTVersion = MQTTVERSION_3_1_1;
    CHECK(MQTTClient_connect(client, &options) == MQTTCLIENT_SUCCESS);
    CHECK(options.returned.MQTTVersion == MQTTVERSION_3_1_1);
    return options.returned.sessionPresent;
}

static void publish(MQTTClient client, const char *name, char *payload, int qos, int retained) {
    MQTTClient_deliveryToken token;
    int length = (int)strlen(payload);
    CHECK(MQTTClient_publish(client, topic(name), length, payload, qos, retained, &token) == 0);
    CHECK(MQTTClient_waitForCompletion(client, token, TIMEOUT_MS) == 0);
}

static void expect(MQTTClient client, const char *name, const char *payload, int qos, int retained) {
    MQTTClient_message *message = NULL;
    char *received = NULL;
    int length;
    int code = MQTTClient_receive(client, &received, &length, &message, TIMEOUT_MS);
    CHECK(code == MQTTCLIENT_SUCCESS || code == MQTTCLIENT_TOPICNAME_TRUNCATED);
    CHECK(message != NULL);
    CHECK(strcmp(received, topic(name)) == 0);
    CHECK(message->payloadlen == (int)strlen(payload));
    CHECK(memcmp(message->payload, payload, strlen(payload)) == 0);
    CHECK(message->qos == qos);
    CHECK(message->retained == retained);
    MQTTClient_freeMessage(&message);
    MQTTClient_free(received);
}

int main(int count, char **arguments) {
    char uri[128], id[256];
    MQTTClient client;
    CHECK(count == 5);
    prefix = arguments[3];
    snprintf(uri, sizeof uri, "tcp://%s:%s", arguments[1], arguments[2]);
    snprintf(id, sizeof id, "%s-client", prefix);
    CHECK(MQTTClient_create(&client, uri, id, MQTTCLIENT_PERSISTENCE_NONE, NULL) == 0);
    if (strcmp(arguments[4], "first") == 0) {
        CHECK(!connect_to(client));
        char *filters[] = {topic("q0"), topic("q1"), topic("q2")};
        int granted[] = {0, 1, 2};
        CHECK(MQTTClient_subscribeMany(client, 3, filters, granted) == 0);
        for (int qos = 0; qos < 3; qos++) {
            char name[] = {'q', (char)('0' + qos), 0};
            CHECK(granted[qos] == qos);
            publish(client, name, "hello", qos, 0);
            expect(client, name, "hello", qos, 0);
        }
        publish(client, "retained", "kept", 1, 1);
        CHECK(MQTTClient_subscribe(client, topic("retained"), 2) == 0);
        expect(client, "retained", "kept", 1, 1);
        CHECK(MQTTClient_disconnect(client, TIMEOUT_MS) == 0);
        CHECK(connect_to(client));
        publish(client, "q1", "again", 1, 0);
        expect(client, "q1", "again", 1, 0);
        puts("ready");
        fflush(stdout);
        sleep(60);
    } else {
        CHECK(connect_to(client));
        expect(client, "q1", "queued 1", 1, 0);
        expect(client, "q2", "queued 2", 2, 0);
        CHECK(MQTTClient_subscribe(client, topic("will"), 1) == 0);
        expect(client, "will", "died", 1, 1);
        CHECK(MQTTClient_disconnect(client, TIMEOUT_MS) == 0);
        puts("done");
    }
    MQTTClient_destroy(&client);
    return 0;
}
