//! Each call of the engine.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use statehouse_cluster::etcd::{CheckError, Etcd, Login, Tls};
use statehouse_cluster::{
    Condition, Engine, EngineError, KeyRange, Outcome, Revision, Transaction, limits,
};
use tokio::io::{AsyncReadExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use crate::kine::send;
use crate::nodes::{Nodes, connect, own_address};

fn put(condition: Condition, value: &'static str) -> Transaction {
    Transaction {
        key: b"k".to_vec(),
        condition,
        puts: vec![(b"k".to_vec(), Bytes::from_static(value.as_bytes()))],
        deletes: Vec::new(),
    }
}

fn applied(outcome: Outcome) -> Revision {
    match outcome {
        Outcome::Applied(revision) => revision,
        Outcome::Failed(value) => panic!("the condition did not hold: {value:?}"),
    }
}

#[tokio::test]
async fn transaction_compares_the_value() {
    let nodes = Nodes::start(1);
    let etcd = connect(&nodes, None).await;
    applied(etcd.transact(&put(Condition::Absent, "a")).await.unwrap());
    let other = Condition::Value(Bytes::from_static(b"b"));
    for condition in [Condition::Absent, other] {
        let outcome = etcd.transact(&put(condition, "x")).await.unwrap();
        let Outcome::Failed(value) = outcome else {
            panic!("the condition held");
        };
        assert_eq!(value.value.as_deref(), Some(&b"a"[..]));
    }
    let same = Condition::Value(Bytes::from_static(b"a"));
    applied(etcd.transact(&put(same, "b")).await.unwrap());
    applied(etcd.transact(&put(Condition::Always, "c")).await.unwrap());
    let value = etcd.get(b"k").await.unwrap();
    assert_eq!(value.value.as_deref(), Some(&b"c"[..]));
    assert_eq!(etcd.get(b"none").await.unwrap().value, None);
    let status = etcd.status().await.unwrap();
    assert_eq!(status.voters, 1);
    assert!(status.bytes > 0 && status.version.starts_with("3."));
}

/// The server answers when both requests of a status have arrived.
#[tokio::test]
async fn status_sends_its_requests_at_the_same_time() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        let mut waiting = Vec::new();
        while let Some(Ok((request, respond))) = connection.accept().await {
            waiting.push((request, respond));
            if waiting.len() == 2 {
                for (request, respond) in waiting.drain(..) {
                    send(request.uri().path(), respond);
                }
            }
        }
    });
    let etcd = Etcd::new(&[url], None).unwrap();
    let status = timeout(Duration::from_secs(30), etcd.status()).await;
    let status = status.expect("a request waits for the answer to another one");
    assert_eq!(status.unwrap().version, "3.5.13");
}

#[tokio::test]
async fn range_and_watch_respect_the_revision() {
    let nodes = Nodes::start(1);
    let etcd = connect(&nodes, None).await;
    let key = |number: u32| format!("r/{number:04}").into_bytes();
    let all = KeyRange::new(key(0), key(9999));
    let mut fill = put(Condition::Always, "v");
    let pair = |number| (key(number), Bytes::from_static(b"value"));
    fill.puts = (0..20).map(pair).collect();
    let first = applied(etcd.transact(&fill).await.unwrap());
    fill.puts = vec![pair(20)];
    fill.deletes = vec![KeyRange::new(key(0), key(10))];
    let second = applied(etcd.transact(&fill).await.unwrap());

    let page = etcd.range(&all, Some(first), 16).await.unwrap();
    assert_eq!((page.values.len(), page.more), (16, true));
    let page = etcd.range(&all, None, 16).await.unwrap();
    assert_eq!((page.values.len(), page.more), (11, false));
    assert_eq!(page.values[0].0, key(10));

    let mut watch = etcd.watch(&all, second).await.unwrap();
    let mut deleted = 0;
    loop {
        let change = watch.recv().await.unwrap().unwrap();
        if change.value.is_some() {
            assert_eq!(change.key, key(20));
            break;
        }
        deleted += 1;
    }
    assert_eq!(deleted, 10);

    etcd.compact(second).await.unwrap();
    etcd.compact(first).await.unwrap();
    let error = etcd.range(&all, Some(first), 16).await.unwrap_err();
    assert_eq!(error, EngineError::Compacted);
    // etcd reports it when the watch is created or right after.
    match etcd.watch(&all, first).await {
        Err(error) => assert_eq!(error, EngineError::Compacted),
        Ok(mut watch) => assert_eq!(watch.recv().await, Some(Err(EngineError::Compacted))),
    }
}

#[tokio::test]
async fn unreachable_endpoint_is_not_applied() {
    let etcd = Etcd::new(&["http://127.0.0.1:1".into()], None).unwrap();
    let error = etcd.transact(&put(Condition::Always, "a")).await;
    assert!(
        matches!(error, Err(EngineError::NotApplied(_))),
        "{error:?}"
    );
    assert!(etcd.check().await.is_err());
}

/// The system accepts connections for a process that is stopped, and acknowledges their bytes.
#[tokio::test(flavor = "multi_thread")]
async fn check_passes_over_a_server_that_never_answers() {
    let nodes = Nodes::start(1);
    drop(connect(&nodes, None).await);
    let frozen = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", frozen.local_addr().unwrap());
    let etcd = Etcd::new(&[url, nodes.urls()[0].clone()], None).unwrap();
    etcd.check().await.unwrap();
    let (mut socket, _) = frozen.accept().await.unwrap();
    let ends = async { while let Ok(1..) = socket.read(&mut [0; 1024]).await {} };
    let ended = timeout(Duration::from_millis(100), ends).await;
    assert!(
        ended.is_err(),
        "the check waited for the end of a connection"
    );
    etcd.get(b"k").await.unwrap();
}

/// A small machine computes the hash of a password for seconds.
#[tokio::test(flavor = "multi_thread")]
async fn check_waits_for_a_slow_login() {
    let [nodes, others] = [(); 2].map(|()| Nodes::start(1));
    for nodes in [&nodes, &others] {
        drop(connect(nodes, None).await);
    }
    let slow = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", slow.local_addr().unwrap());
    let server = others.urls()[0].trim_start_matches("http://").to_owned();
    let passing = tokio::spawn(async move {
        let (mut client, _) = slow.accept().await.unwrap();
        sleep(limits::PROBE_TIMEOUT + Duration::from_secs(1)).await;
        let mut server = TcpStream::connect(server).await.unwrap();
        _ = copy_bidirectional(&mut client, &mut server).await;
    });
    let login = Login {
        user: "root".to_owned(),
        password: Arc::new(|| Ok("secret".to_owned())),
    };
    let etcd = Etcd::new(&[nodes.urls()[0].clone(), url], None).unwrap();
    let error = etcd
        .with_login(login)
        .check()
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("different etcd clusters"), "{error}");
    passing.abort();
}

#[tokio::test]
async fn oversized_request_is_refused() {
    let nodes = Nodes::start(1);
    let etcd = connect(&nodes, None).await;
    let mut transaction = put(Condition::Always, "a");
    transaction.puts[0].1 = vec![0; 2 << 20].into();
    let error = etcd.transact(&transaction).await;
    assert!(matches!(error, Err(EngineError::Refused(_))), "{error:?}");
}

#[tokio::test]
async fn client_certificate_is_accepted_over_tls() {
    let directory = tempfile::tempdir().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let issue = |name: &str| {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &ca).unwrap();
        (certificate.pem(), key.serialize_pem())
    };
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (certificate, key) = issue(&own_address().ip().to_string());
    let arguments = [
        format!("--trusted-ca-file={}", file("ca", &ca.pem())),
        format!("--cert-file={}", file("cert", &certificate)),
        format!("--key-file={}", file("key", &key)),
        "--client-cert-auth".to_owned(),
    ];
    let nodes = Nodes::start_with(1, "https", &arguments);
    let (certificate, key) = issue("client");
    let mut tls = Tls {
        ca_pem: ca.pem().into_bytes(),
        identity_pem: Some((certificate.into_bytes(), key.into_bytes())),
    };
    let etcd = connect(&nodes, Some(&tls)).await;
    applied(etcd.transact(&put(Condition::Always, "a")).await.unwrap());
    tls.identity_pem = None;
    let anonymous = Etcd::new(nodes.urls(), Some(&tls)).unwrap();
    assert!(anonymous.get(b"k").await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn leading_server_is_preferred_from_any_other() {
    let mut nodes = Nodes::start(3);
    let etcd = connect(&nodes, None).await;
    let check = async || {
        for _ in 0..3 {
            etcd.prefer_leader().await.unwrap();
            assert!(etcd.status().await.unwrap().leads);
            etcd.next_endpoint();
        }
    };
    let leading = nodes.leader();
    check().await;
    // A server that does not answer is skipped.
    nodes.kill(leading);
    nodes.leader();
    check().await;
}

/// A server that lost its disk can return as an etcd cluster of its own, which lacks the log.
#[tokio::test]
async fn answers_of_another_etcd_cluster_are_not_accepted() {
    let (own, foreign) = (Nodes::start(1), Nodes::start(1));
    let urls = [foreign.urls()[0].clone(), own.urls()[0].clone()];
    let etcd = Etcd::new(&urls, None).unwrap();
    etcd.next_endpoint();
    applied(etcd.transact(&put(Condition::Always, "a")).await.unwrap());
    etcd.next_endpoint();
    let transaction = put(Condition::Always, "b");
    let all = KeyRange::new(b"k".to_vec(), b"l".to_vec());
    let refused: [Option<EngineError>; 6] = [
        etcd.transact(&transaction).await.err(),
        etcd.get(b"k").await.err(),
        etcd.range(&all, None, 16).await.err(),
        etcd.watch(&all, Revision(1)).await.err(),
        etcd.status().await.err(),
        etcd.compact(Revision(1)).await.err(),
    ];
    for (call, error) in refused.iter().enumerate() {
        let Some(EngineError::NotApplied(why)) = error else {
            panic!("call {call}: {error:?}");
        };
        assert!(why.contains("belongs to another etcd cluster"), "{why}");
        assert!(why.contains(&urls[0]), "{why}");
    }
    // A server alone leads its etcd cluster.
    etcd.prefer_leader().await.unwrap();
    let value = etcd.get(b"k").await.unwrap();
    assert_eq!(value.value.as_deref(), Some(&b"a"[..]));
}

/// Otherwise the first answer would decide, which may be that of the wrong server.
#[tokio::test]
async fn connections_of_a_host_share_the_etcd_cluster() {
    let (own, foreign) = (Nodes::start(1), Nodes::start(1));
    let etcd = connect(&own, None).await;
    let urls = [foreign.urls()[0].clone(), own.urls()[0].clone()];
    let second = Etcd::new(&urls, None).unwrap().of_same_cluster(&etcd);
    let error = second.get(b"k").await.unwrap_err();
    let EngineError::NotApplied(why) = &error else {
        panic!("{error:?}");
    };
    assert!(why.contains("belongs to another etcd cluster"), "{why}");
    second.next_endpoint();
    second.get(b"k").await.unwrap();
}

#[tokio::test]
async fn check_refuses_another_etcd_cluster_than_before() {
    let (own, foreign) = (Nodes::start(1), Nodes::start(1));
    drop(connect(&foreign, None).await);
    let etcd = connect(&own, None).await;
    let second = Etcd::new(foreign.urls(), None).unwrap();
    let refused = second.of_same_cluster(&etcd).check().await.unwrap_err();
    assert!(matches!(refused, CheckError::Unusable(_)), "{refused:?}");
    let said = refused.to_string();
    assert!(said.contains("belongs to another etcd cluster"), "{said}");
}
