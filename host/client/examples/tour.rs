//! A tour of the client: it sets, reads and watches a key, then writes under a lock. The argument
//! is the address of a store, by default `127.0.0.1:1883`.

use std::time::Duration;

use statehouse_client::{Client, Condition, LockOptions, Options, SetOptions, WatchEvent};

type Failure = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let address = std::env::args().nth(1);
    let address = address.as_deref().unwrap_or("127.0.0.1:1883");
    let (host, port) = address.rsplit_once(':').ok_or("the address is HOST:PORT")?;
    let client = Client::connect(Options {
        host: host.trim_matches(['[', ']']).to_owned(),
        port: port.parse()?,
        ..Options::default()
    })
    .await?;

    // The watch begins before the SET, so it reports that change.
    let mut watch = client.watch("tour/greeting").await?;
    let set = client
        .set("tour/greeting", "hello", SetOptions::default())
        .await?;
    if let WatchEvent::Set { value, version, .. } = watch.next().await? {
        println!("changed to {value:?} at {version}");
    }

    // Nothing is overwritten if another client has changed the key since.
    let seen = set.version.ok_or("a SET without a version")?;
    let unchanged = SetOptions {
        condition: Condition::IfVersion(seen),
        ..SetOptions::default()
    };
    let set = client.set("tour/greeting", "hi", unchanged).await?;
    println!("changed again: {}", set.applied);

    let patience = LockOptions {
        wait: Some(Duration::from_secs(5)),
        ..LockOptions::default()
    };
    let lock = client.lock("tour/lock", patience).await?;
    let lock = lock.ok_or("another client holds the lock")?;
    // The token refuses this write if the lock was lost in the meantime.
    let protected = SetOptions {
        fencing_token: Some(lock.fencing_token().clone()),
        ..SetOptions::default()
    };
    client.set("tour/protected", "data", protected).await?;
    println!("released the lock: {}", lock.release().await?);

    if let Some(value) = client.get("tour/greeting").await? {
        println!("the greeting is {:?}", value.bytes);
    }
    client.close().await;
    Ok(())
}
