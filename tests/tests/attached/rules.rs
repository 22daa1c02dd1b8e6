//! What the store does with messages that are no proper requests, where it cannot disconnect anybody and its own
//! reason codes reach nobody.

use std::time::Duration;

use statehouse_tests::{
    Request,
    store::{NOTIFICATION_PREFIX, PREVIEW_TOPIC, REQUEST_TOPIC},
};

use crate::{asker::Asker, scene::Scene};

/// Sends a request that is wrong in one thing. It is dropped: what is asked behind it is answered.
fn dropped(asker: &mut Asker, wrong: impl FnOnce(&mut Request)) {
    let mut request = asker.store.command(&["SET", "key", "dropped"]);
    wrong(&mut request);
    asker.store.client.start(request.publish());
    assert_eq!(asker.ask(&["GET", "key"]).text, "$-1\\r\\n");
    assert_eq!(asker.answer_so_far(&request), None);
}

#[test]
fn a_forbidden_response_topic_is_dropped_and_counted() {
    let scene = Scene::start();
    let mut asker = scene.asker("asker");
    for (n, topic) in [
        REQUEST_TOPIC,
        PREVIEW_TOPIC,
        NOTIFICATION_PREFIX,
        &format!("{NOTIFICATION_PREFIX}/00/command/notify/00"),
    ]
    .iter()
    .enumerate()
    {
        dropped(&mut asker, |it| it.response_topic = Some((*topic).into()));
        assert_eq!(scene.figure("kicked_total"), n as u64 + 1, "{topic}");
    }
    let told = scene.host.wait_for_log("asker");
    assert!(told.contains("response topic"), "{told}");
    assert_eq!(scene.figure("refused_total"), 0);
}

#[test]
fn what_cannot_be_answered_is_dropped_and_counted() {
    let scene = Scene::start();
    let mut asker = scene.asker("asker");
    dropped(&mut asker, |it| it.response_topic = None);
    dropped(&mut asker, |it| it.correlation = None);
    dropped(&mut asker, |it| {
        (it.qos, it.correlation) = (0, None);
    });
    assert_eq!(scene.figure("refused_total"), 3);
    assert_eq!(scene.figure("kicked_total"), 0);
}

#[test]
fn a_request_without_an_acknowledgement_is_refused_where_it_can_be_answered() {
    let scene = Scene::start();
    let mut asker = scene.asker("asker");
    let mut request = asker.store.command(&["SET", "key", "value"]);
    request.qos = 0;
    asker.store.client.start(request.publish());
    assert_eq!(asker.answer(&request).text, "-ERR syntax error\\r\\n");
}

/// A client is who it says it is, else who its response topic is of, else nobody; and nobody has no watches.
#[test]
fn a_watch_is_of_who_asks() {
    let scene = Scene::start();
    let mut asker = scene.asker("asker");
    let watch = |asker: &mut Asker, key: &str, change: fn(Request) -> Request| {
        let request = change(asker.store.command(&["KEYNOTIFY", key]));
        asker.store.client.start(request.publish());
        asker.answer(&request).text
    };
    assert_eq!(watch(&mut asker, "said", |it| it), "+OK\\r\\n");
    let silent = |it: Request| it.without("__srcId");
    assert_eq!(watch(&mut asker, "topic", silent), "+OK\\r\\n");
    asker.store.client.subscribe("answers/#", 1);
    let unknown = |it: Request| {
        let mut it = it.without("__srcId");
        it.response_topic = Some("answers/mine".into());
        it
    };
    let told = watch(&mut asker, "unknown", unknown);
    assert_eq!(told, "-ERR not authorized\\r\\n");
    // All else is answered, whoever asks.
    let request = unknown(asker.store.command(&["SET", "said", "value"]));
    asker.store.client.start(request.publish());
    let said = asker.answer(&request).version.unwrap();
    let topic = asker.set("topic", "value");
    asker.hear("said", &said);
    asker.hear("topic", &topic);
}

/// Nobody waits any more for what was asked so long ago.
#[test]
fn a_request_that_expired_while_the_store_was_away_is_not_done() {
    let mut scene = Scene::start();
    let mut asker = scene.asker("asker");
    let brief = |asker: &mut Asker, key: &str, expiry_s| {
        let mut request = asker.store.command(&["SET", key, "value"]);
        request.expiry_s = Some(expiry_s);
        asker.store.client.start(request.publish());
        request
    };
    scene.host.kill();
    let (late, patient) = (
        brief(&mut asker, "late", 1),
        brief(&mut asker, "patient", 60),
    );
    asker.listen(Duration::from_millis(2100));
    scene.host.restart();
    assert_eq!(asker.answer(&patient).text, "+OK\\r\\n");
    assert_eq!(asker.ask(&["GET", "late"]).text, "$-1\\r\\n");
    assert_eq!(asker.answer_so_far(&late), None);
}

/// The same where the request was on its way when the connection broke.
#[test]
fn a_request_that_expired_on_its_way_is_not_done() {
    let scene = Scene::start();
    let mut asker = scene.asker("asker");
    scene.proxy.refuse(true);
    scene.proxy.script(|seen| {
        let late = seen.packet.body.windows(4).any(|part| part == b"late");
        match late {
            true => statehouse_tests::Fate::CutBefore,
            false => statehouse_tests::Fate::Pass,
        }
    });
    let mut late = asker.store.command(&["SET", "late", "value"]);
    late.expiry_s = Some(1);
    asker.store.client.start(late.publish());
    asker.listen(Duration::from_millis(2100));
    scene.proxy.pass();
    scene.proxy.refuse(false);
    assert_eq!(asker.ask(&["GET", "late"]).text, "$-1\\r\\n");
    assert_eq!(asker.answer_so_far(&late), None);
}
