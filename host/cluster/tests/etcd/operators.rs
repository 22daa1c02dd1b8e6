//! Modules, members, the creation from a state, and checks on etcd.

use std::time::{Duration, Instant};

use statehouse_cluster::{
    Access, Engine, FirstState, Id, LogPosition, MachineClock, Modules, Role, Severity, check,
    create, create_from, identity, members, overview,
};
use std::sync::Arc;

use crate::nodes::{Nodes, connect};
use crate::store::Host;

async fn access(nodes: &Nodes) -> (Arc<dyn Engine>, Access) {
    let engine: Arc<dyn Engine> = Arc::new(connect(nodes, None).await);
    let access = Access::new(engine.clone(), Arc::new(MachineClock), "test");
    (engine, access)
}

#[tokio::test(flavor = "multi_thread")]
async fn module_is_stored_and_read() {
    let nodes = Nodes::start(1);
    let (engine, access) = access(&nodes).await;
    let modules = Modules::new(access, 2 << 30);
    let module: Vec<u8> = (0..20_u32 << 20).map(|it| (it / 4096) as u8).collect();
    let began = Instant::now();
    let digest = modules.put(&module).await.unwrap();
    let stored = began.elapsed();
    assert_eq!(modules.get(&digest).await.unwrap(), Some(module));
    println!(
        "20 MiB stored in {stored:?}, read in {:?}",
        began.elapsed() - stored
    );
    assert!(modules.list().await.unwrap()[0].is_complete);
    // etcd counts what it has committed to its file, at most 100 ms later.
    let end = Instant::now() + Duration::from_secs(10);
    while engine.status().await.unwrap().bytes <= 20 << 20 {
        assert!(Instant::now() < end, "the module takes no space");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_continue_the_state_from_which_their_cluster_began() {
    let nodes = Nodes::start(1);
    let (_, access) = access(&nodes).await;
    let records: Vec<_> = (0..1000).map(|it| vec![it as u8; 1 + it * 7]).collect();
    let state = |id: u8| {
        let mut blocks = records.clone().into_iter();
        FirstState {
            id: Id([id; 16]),
            now_ms: 0,
            position: LogPosition(1000),
            next_block: move |block: &mut Vec<u8>| {
                let next = blocks.next();
                block.extend(next.iter().flatten());
                Ok(next.is_some())
            },
        }
    };
    let creation = create_from(&access, state(1));
    let partly = tokio::time::timeout(Duration::from_millis(5), creation).await;
    assert!(partly.is_err(), "it was created too early");
    assert!(create_from(&access, state(1)).await.unwrap());
    let other = create_from(&access, state(2)).await;
    assert!(!other.unwrap(), "another cluster exists");
    identity(&access).await.unwrap();

    let first = Host::start("a", connect(&nodes, None).await, |_| {});
    let log = first.leads().await;
    let second = Host::start("b", connect(&nodes, None).await, |_| {});
    let position = first.append(&log, b"next");
    assert_eq!(position, LogPosition(1002));
    let replicated = second.records(position).await;
    assert_eq!(replicated[..1000], records);
    assert_eq!(replicated[1000..], [b"epoch 1".to_vec(), b"next".to_vec()]);
    let blocks = second.shared.lock().unwrap().blocks;
    assert_eq!(blocks, 1000);
}

#[tokio::test(flavor = "multi_thread")]
async fn check_and_overview_show_the_cluster() {
    let nodes = Nodes::start(1);
    let (etcd, access) = access(&nodes).await;
    create(&*etcd, "test", Id([1; 16]), 0).await.unwrap();
    let host = Host::start("a", connect(&nodes, None).await, |_| {});
    let log = host.leads().await;
    let position = host.append(&log, &[1; 10_000]);
    log.wait_released(position).await.unwrap();
    let report = check(&access, 0, 2 << 30).await;
    println!("{report}");
    assert_eq!(report.worst(), Severity::Warning, "{report}");
    let text = report.to_string();
    assert!(
        text.contains("voters of etcd is 1") && text.contains("10 commits"),
        "{text}"
    );
    let overview = overview(&access, 0).await.unwrap();
    println!("{overview}");
    assert_eq!(overview.log.frames, 2);
    assert!(overview.log.bytes > 10_000, "{:?}", overview.log);
    assert!(overview.status.file_bytes >= overview.status.bytes);
    let members = members(&access).await.unwrap();
    assert_eq!(members[0].info.as_ref().unwrap().role, Role::Leading);
}

#[tokio::test]
async fn unreachable_endpoint_is_a_finding() {
    let nodes = Nodes::start(1);
    drop(connect(&nodes, None).await);
    let urls = [nodes.urls()[0].clone(), "http://127.0.0.1:1".to_owned()];
    let etcd = statehouse_cluster::etcd::Etcd::new(&urls, None).unwrap();
    let findings = etcd.examine().await.unwrap();
    assert_eq!(findings.len(), 2);
    let unreachable = findings[1].to_string();
    assert!(
        unreachable.contains("127.0.0.1:1 does not answer"),
        "{unreachable}"
    );
    assert!(findings[0].measured.contains("3."), "{}", findings[0]);
}
