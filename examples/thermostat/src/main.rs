//! A thermostat that follows its set point in the state store.
//!
//! It watches the key `{name}/setPoint`, which any client may set. Every second it writes
//! `{name}/temperature` with an expiry. When the thermostat stops, the reading expires, so that no
//! client uses an old temperature.
//!
//! ```text
//! cargo run -p thermostat -- 127.0.0.1:1883 kitchen --for 30s
//! statehouse set kitchen/setPoint 23.5
//! statehouse watch kitchen/temperature
//! ```
#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::{Context, bail};
use statehouse_client::{Client, Options, SetOptions, WatchEvent, parse_duration};
use tokio::time::{Instant, interval, sleep_until};

/// The time between two readings.
const PERIOD: Duration = Duration::from_secs(1);
/// The expiry of a reading: three periods, so that a late or lost reading does no harm.
const READING_TTL: Duration = Duration::from_secs(3);
/// The largest change of the temperature in one period.
const STEP_CELSIUS: f64 = 0.5;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    let client = Client::connect(Options {
        host: arguments.host,
        port: arguments.port,
        ..Options::default()
    })
    .await?;

    let set_point_key = format!("{}/setPoint", arguments.name);
    let temperature_key = format!("{}/temperature", arguments.name);

    // Watch before get. A change between the two is then seen, at worst twice.
    let mut changes = client.watch(&set_point_key).await?;
    let mut set_point = read_set_point(&client, &set_point_key).await?;
    println!("set point {}", describe(set_point));

    let mut temperature = 20.0;
    let mut ticks = interval(PERIOD);
    let end = arguments.run_for.map(|time| Instant::now() + time);
    loop {
        tokio::select! {
            change = changes.next() => {
                set_point = match change? {
                    WatchEvent::Set { value, .. } => celsius(&value),
                    WatchEvent::Deleted { .. } => None,
                    // The connection was lost for a while, so read the current set point.
                    _ => read_set_point(&client, &set_point_key).await?,
                };
                println!("set point {}", describe(set_point));
            }
            _ = ticks.tick() => {
                temperature = follow(temperature, set_point);
                let reading = SetOptions { expiry: Some(READING_TTL), ..SetOptions::default() };
                let value = format!("{temperature:.1}");
                client.set(&temperature_key, &value, reading).await?;
            }
            // This branch is disabled if there is no end.
            () = sleep_until(end.unwrap_or_else(Instant::now)), if end.is_some() => break,
        }
    }
    // Ends the watch as well.
    client.close().await;
    Ok(())
}

/// The stored set point, if it is valid.
async fn read_set_point(client: &Client, key: &str) -> anyhow::Result<Option<f64>> {
    let value = client.get(key).await?;
    Ok(value.and_then(|value| celsius(&value.bytes)))
}

/// Parses a set point. Any client can write the key, so the value can be invalid.
fn celsius(value: &[u8]) -> Option<f64> {
    let number: f64 = std::str::from_utf8(value).ok()?.trim().parse().ok()?;
    (5.0..=35.0).contains(&number).then_some(number)
}

/// The temperature one period later. Without a set point, it does not change.
fn follow(temperature: f64, set_point: Option<f64>) -> f64 {
    match set_point {
        Some(set_point) => {
            temperature + (set_point - temperature).clamp(-STEP_CELSIUS, STEP_CELSIUS)
        }
        None => temperature,
    }
}

fn describe(set_point: Option<f64>) -> String {
    set_point.map_or_else(|| "none".into(), |celsius| format!("{celsius:.1}"))
}

/// `[HOST:PORT] [NAME] [--for TIME]`
#[derive(Debug, PartialEq)]
struct Arguments {
    host: String,
    port: u16,
    name: String,
    run_for: Option<Duration>,
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> anyhow::Result<Self> {
        let mut run_for = None;
        let mut positional = Vec::new();
        while let Some(word) = words.next() {
            if word == "--for" {
                let time = words.next().context("--for needs a time, such as 5s")?;
                run_for = Some(parse_duration(&time)?);
            } else if word.starts_with('-') || positional.len() == 2 {
                bail!("usage: thermostat [HOST:PORT] [NAME] [--for TIME]");
            } else {
                positional.push(word);
            }
        }
        let mut positional = positional.into_iter();
        let address = positional.next().unwrap_or_else(|| "127.0.0.1:1883".into());
        let (host, port) = address
            .rsplit_once(':')
            .context("write the address as HOST:PORT")?;
        Ok(Self {
            host: host.trim_matches(['[', ']']).into(),
            port: port
                .parse()
                .with_context(|| format!("{port} is not a port"))?,
            name: positional.next().unwrap_or_else(|| "thermostat".into()),
            run_for,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> anyhow::Result<Arguments> {
        Arguments::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn arguments_parse_or_fail() {
        assert_eq!(
            parse("[::1]:1884 kitchen --for 5s").unwrap(),
            Arguments {
                host: "::1".into(),
                port: 1884,
                name: "kitchen".into(),
                run_for: Some(Duration::from_secs(5)),
            }
        );
        assert_eq!(parse("").unwrap().port, 1883);
        for bad in ["localhost", "a:b", "--for", "--for 5", "--help", "a:1 b c"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn set_point_must_be_a_room_temperature() {
        assert_eq!(celsius(b" 21.5\n"), Some(21.5));
        for bad in [&b""[..], b"warm", b"\xff", b"4.9", b"36", b"NaN", b"inf"] {
            assert_eq!(celsius(bad), None);
        }
    }

    #[test]
    fn temperature_follows_the_set_point_in_steps() {
        assert_eq!(follow(20.0, Some(23.0)), 20.5);
        assert_eq!(follow(20.0, Some(19.8)), 19.8);
        assert_eq!(follow(20.0, None), 20.0);
    }
}
