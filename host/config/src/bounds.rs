//! The limits of clients, which may change while the store runs.
//!
//! Combines flags with the same keys of the file and yields consistent [`Bounds`]. A lowered limit
//! refuses new entries, but must never remove existing ones.

use std::num::{NonZeroU16, NonZeroU32, NonZeroU64};

use super::layer::settings;
use super::memory::Memory;
use super::values;
use super::{ConfigError, Fuel, KeyBytes, PacketBytes};
use crate::limits;
use statehouse_core::store::{Quota, Supervision};

settings! {
    /// The limit settings of `serve`.
    #[command(next_help_heading = "Limits")]
    pub struct LimitFlags {
        /// Maximum number of keys in the store [default: 10000000]
        #[arg(long, value_name = "N", value_parser = values::number::<NonZeroU64>, env = "STATEHOUSE_MAX_KEYS")]
        #[serde(deserialize_with = "values::file_number")]
        pub max_keys: Option<NonZeroU64>,

        /// Maximum bytes of keys and values; each entry counts 128 bytes more [default: three
        /// eighths of the memory, at most 512 MiB]
        #[arg(long, value_name = "BYTES", value_parser = values::nonzero_size, env = "STATEHOUSE_MAX_BYTES")]
        #[serde(deserialize_with = "values::nonzero_file_size")]
        pub max_bytes: Option<NonZeroU64>,

        /// Maximum number of keys of one client; a key belongs to the client that wrote it last
        /// [default: three quarters of the store's limit]
        #[arg(long, value_name = "N", value_parser = values::number::<NonZeroU64>, env = "STATEHOUSE_MAX_CLIENT_KEYS")]
        #[serde(deserialize_with = "values::file_number")]
        pub max_client_keys: Option<NonZeroU64>,

        /// Maximum bytes of one client's keys and values, counted like the store's [default: three
        /// quarters of the store's limit, at least the longest key and value]
        #[arg(long, value_name = "BYTES", value_parser = values::nonzero_size, env = "STATEHOUSE_MAX_CLIENT_BYTES")]
        #[serde(deserialize_with = "values::nonzero_file_size")]
        pub max_client_bytes: Option<NonZeroU64>,

        /// Maximum length of a key [default: 32768]
        #[arg(long, value_name = "BYTES", env = "STATEHOUSE_MAX_KEY_BYTES")]
        pub max_key_bytes: Option<KeyBytes>,

        /// Maximum length of a value [default: 1048576, less if the longest packet or a client's
        /// queue has no room for it]
        #[arg(long, value_name = "BYTES", value_parser = values::nonzero_size, env = "STATEHOUSE_MAX_VALUE_BYTES")]
        #[serde(deserialize_with = "values::nonzero_file_size")]
        pub max_value_bytes: Option<NonZeroU64>,

        /// Maximum number of watches; a key counts once for each of its watchers [default: 1000000]
        #[arg(long, value_name = "N", value_parser = values::number::<NonZeroU64>, env = "STATEHOUSE_MAX_WATCHES")]
        #[serde(deserialize_with = "values::file_number")]
        pub max_watches: Option<NonZeroU64>,

        /// Maximum number of keys that one client watches [default: 10000]
        #[arg(long, value_name = "N", value_parser = values::number::<NonZeroU64>, env = "STATEHOUSE_MAX_CLIENT_WATCHES")]
        #[serde(deserialize_with = "values::file_number")]
        pub max_client_watches: Option<NonZeroU64>,

        /// Maximum fuel of one request, plus 64 for each byte of it; a SET uses about 3100, and with
        /// less than 3000000 a SCAN of many keys may fail [default: 4000000; range 50000 to
        /// 40000000]
        #[arg(long, value_name = "FUEL", env = "STATEHOUSE_MAX_FUEL")]
        pub max_fuel: Option<Fuel>,

        /// Maximum length of an MQTT packet [default: 2097152]
        #[arg(long, value_name = "BYTES", env = "STATEHOUSE_MAX_PACKET_BYTES")]
        pub max_packet_bytes: Option<PacketBytes>,

        /// Maximum bytes queued for one client before it is disconnected [default: an eighth of
        /// --max-total-queue-bytes, at most 16 MiB, at least one packet if the total allows it]
        #[arg(long, value_name = "BYTES", value_parser = values::nonzero_size, env = "STATEHOUSE_MAX_QUEUE_BYTES")]
        #[serde(deserialize_with = "values::nonzero_file_size")]
        pub max_queue_bytes: Option<NonZeroU64>,

        /// Maximum bytes queued for all clients together; sessions of disconnected clients may use
        /// half of it [default: an eighth of the memory, at most 512 MiB, at least one packet]
        #[arg(long, value_name = "BYTES", value_parser = values::nonzero_size, env = "STATEHOUSE_MAX_TOTAL_QUEUE_BYTES")]
        #[serde(deserialize_with = "values::nonzero_file_size")]
        pub max_total_queue_bytes: Option<NonZeroU64>,

        /// Maximum number of connections [default: one for each 64 KiB of memory, at most 10000]
        #[arg(long, value_name = "N", value_parser = values::number::<NonZeroU64>, env = "STATEHOUSE_MAX_CONNECTIONS")]
        #[serde(deserialize_with = "values::file_number")]
        pub max_connections: Option<NonZeroU64>,

        /// Maximum number of sessions, including those of disconnected clients [default: one for
        /// each 128 KiB of memory, at most 20000]
        #[arg(long, value_name = "N", value_parser = values::number::<NonZeroU64>, env = "STATEHOUSE_MAX_SESSIONS")]
        #[serde(deserialize_with = "values::file_number")]
        pub max_sessions: Option<NonZeroU64>,

        /// Maximum number of subscriptions of one client [default: 1024]
        #[arg(long, value_name = "N", value_parser = values::number::<NonZeroU64>, env = "STATEHOUSE_MAX_CLIENT_SUBSCRIPTIONS")]
        #[serde(deserialize_with = "values::file_number")]
        pub max_client_subscriptions: Option<NonZeroU64>,

        /// Maximum number of unacknowledged QoS 1 and 2 messages from one client, including
        /// requests: its Receive Maximum. An existing connection keeps the value that it was sent
        /// [default: 1024]
        #[arg(long, value_name = "N", value_parser = values::number::<NonZeroU16>, env = "STATEHOUSE_MAX_CLIENT_IN_FLIGHT")]
        #[serde(deserialize_with = "values::file_number")]
        pub max_client_in_flight: Option<NonZeroU16>,

        /// Maximum number of messages that one client may publish per second, including requests;
        /// further ones are refused with 0x97, quota exceeded [default: unlimited]
        #[arg(long, value_name = "N", value_parser = values::number::<NonZeroU32>, env = "STATEHOUSE_MAX_CLIENT_RATE")]
        #[serde(deserialize_with = "values::file_number")]
        pub max_client_rate: Option<NonZeroU32>,

        /// Maximum number of messages that all clients together may publish per second; further
        /// ones are refused with 0x97 [default: unlimited]
        #[arg(long, value_name = "N", value_parser = values::number::<NonZeroU32>, env = "STATEHOUSE_MAX_RATE")]
        #[serde(deserialize_with = "values::file_number")]
        pub max_rate: Option<NonZeroU32>,
    }
}

/// Limits that are consistent with each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Limits of the table, of watches and of each request.
    pub quota: Quota,
    /// Limits of the embedded broker.
    pub broker: statehouse_mqtt::Limits,
    /// Limits of the active policies.
    pub supervision: Supervision,
}

impl LimitFlags {
    /// The resulting limits. `attached`: the store is behind a foreign broker, which limits its own
    /// queues.
    pub(super) fn load(
        self,
        attached: bool,
        supervision: Supervision,
        memory: Memory,
    ) -> Result<Bounds, ConfigError> {
        let broker = self.broker(memory);
        let quota = self.quota(&broker, attached, memory)?;
        Ok(Bounds {
            quota,
            broker,
            supervision,
        })
    }

    fn broker(&self, memory: Memory) -> statehouse_mqtt::Limits {
        let size = |set: Option<NonZeroU64>, default: usize| {
            set.map_or(default, |it| {
                usize::try_from(it.get()).unwrap_or(usize::MAX)
            })
        };
        let part = |thirty_seconds, most| memory.usize_part(thirty_seconds, most);
        let default = statehouse_mqtt::Limits::default();
        let packet_bytes_max =
            (self.max_packet_bytes).map_or(default.packet_bytes_max, |PacketBytes(bytes)| bytes);
        // A queue must hold at least one packet, so that a response with the longest value fits.
        let queue_bytes_min = packet_bytes_max + limits::ENVELOPE_BYTES as usize;
        let queue_bytes_total_max = size(
            self.max_total_queue_bytes,
            part(4, default.queue_bytes_total_max).max(queue_bytes_min),
        );
        let subscription_bytes_total_max = part(2, default.subscription_bytes_total_max);
        let of_total = |total: usize| total / limits::CLIENT_PARTS_OF_TOTAL;
        let queue_bytes_max = size(
            self.max_queue_bytes,
            of_total(queue_bytes_total_max)
                .max(queue_bytes_min)
                .min(default.queue_bytes_max)
                .min(queue_bytes_total_max),
        );
        statehouse_mqtt::Limits {
            packet_bytes_max,
            // A growing buffer may have twice the capacity of its content.
            packet_bytes_total_max: part(2, default.packet_bytes_total_max)
                .max(packet_bytes_max.saturating_mul(2)),
            output_bytes_total_max: part(1, default.output_bytes_total_max).max(packet_bytes_max),
            queue_bytes_max,
            retained_bytes_max: default.retained_bytes_max.min(queue_bytes_max / 2),
            queue_bytes_total_max,
            state_bytes_total_max: part(1, default.state_bytes_total_max),
            subscription_bytes_total_max,
            subscription_bytes_per_session_max: of_total(subscription_bytes_total_max)
                .min(default.subscription_bytes_per_session_max),
            connections_max: size(
                self.max_connections,
                part(3, default.connections_max * limits::CONNECTION_BYTES)
                    / limits::CONNECTION_BYTES,
            ),
            sessions_max: size(
                self.max_sessions,
                part(1, default.sessions_max * limits::SESSION_BYTES) / limits::SESSION_BYTES,
            ),
            subscriptions_per_session_max: size(
                self.max_client_subscriptions,
                default.subscriptions_per_session_max,
            ),
            receive_max: (self.max_client_in_flight).map_or(default.receive_max, NonZeroU16::get),
            publishes_per_second_max: (self.max_client_rate)
                .map_or(default.publishes_per_second_max, NonZeroU32::get),
            publishes_per_second_total_max: (self.max_rate)
                .map_or(default.publishes_per_second_total_max, NonZeroU32::get),
            ..default
        }
    }

    fn quota(
        &self,
        broker: &statehouse_mqtt::Limits,
        attached: bool,
        memory: Memory,
    ) -> Result<Quota, ConfigError> {
        let (key_bytes_max, value_bytes_max) = self.lengths(broker, attached)?;
        let pick = |set: Option<NonZeroU64>, default: u64| set.map_or(default, NonZeroU64::get);
        let quota = Quota {
            keys_max: pick(self.max_keys, limits::KEYS_MAX_DEFAULT),
            bytes_max: pick(self.max_bytes, memory.part(12, limits::BYTES_MAX_DEFAULT)),
            key_bytes_max,
            value_bytes_max,
            watches_max: pick(self.max_watches, limits::WATCHES_MAX_DEFAULT),
            watches_per_connection_max: pick(
                self.max_client_watches,
                limits::WATCHES_PER_CONNECTION_MAX_DEFAULT,
            ),
            watch_bytes_max: memory.part(2, limits::WATCH_BYTES_MAX),
            recent_bytes_max: memory.part(1, 2 * limits::RECENT_BYTES_MAX) / 2,
            unreleased_bytes_max: memory.part(1, limits::UNRELEASED_BYTES_MAX),
            fuel_max: self.max_fuel.unwrap_or_default().get(),
            ..Quota::default()
        };
        Ok(quota.with_client(
            self.max_client_keys.map(NonZeroU64::get),
            self.max_client_bytes.map(NonZeroU64::get),
        ))
    }

    /// The longest key and the longest value, in bytes. Fails if a packet has no room for both, or
    /// if the queues have no room for an answer with the value: its client would be disconnected.
    fn lengths(
        &self,
        broker: &statehouse_mqtt::Limits,
        attached: bool,
    ) -> Result<(u64, u64), ConfigError> {
        let packet = broker.packet_bytes_max as u64;
        let key = self.max_key_bytes.map_or(
            limits::KEY_BYTES_MAX_DEFAULT.min(packet / 2),
            |KeyBytes(bytes)| bytes,
        );
        let (name, queue) = match (broker.queue_bytes_total_max, broker.queue_bytes_max) {
            // The foreign broker has the queues.
            _ if attached => ("max_queue_bytes", u64::MAX),
            (total, own) if total <= own => ("max_total_queue_bytes", total as u64),
            (_, own) => ("max_queue_bytes", own as u64),
        };
        if let Some(value) = self.max_value_bytes.map(NonZeroU64::get) {
            if value.saturating_add(key) > packet {
                return Err(ConfigError::Packet { value, key, packet });
            }
            if value.saturating_add(limits::ENVELOPE_BYTES) > queue {
                return Err(ConfigError::Queue { name, queue, value });
            }
            return Ok((key, value));
        }
        // If only the limit of packets or of queues is lowered, that of values follows.
        let queue_room = queue.saturating_sub(limits::ENVELOPE_BYTES);
        let value = packet.min(queue_room).saturating_sub(key);
        if value >= limits::VALUE_BYTES_DERIVED_MIN {
            return Ok((key, value.min(limits::VALUE_BYTES_MAX_DEFAULT)));
        }
        let least = key + limits::VALUE_BYTES_DERIVED_MIN;
        let (name, bytes, least) = match packet <= queue_room {
            true => ("max_packet_bytes", packet, least),
            false => (name, queue, least + limits::ENVELOPE_BYTES),
        };
        Err(ConfigError::NoRoomForValues {
            name,
            bytes,
            key,
            least,
        })
    }
}

/// The limits in force by setting name; those of the broker only if it is the embedded one.
pub fn named(quota: &Quota, broker: Option<&statehouse_mqtt::Limits>) -> Vec<(&'static str, u64)> {
    let mut all = vec![
        ("max_keys", quota.keys_max),
        ("max_bytes", quota.bytes_max),
        ("max_client_keys", quota.client_keys_max),
        ("max_client_bytes", quota.client_bytes_max),
        ("max_key_bytes", quota.key_bytes_max),
        ("max_value_bytes", quota.value_bytes_max),
        ("max_watches", quota.watches_max),
        ("max_client_watches", quota.watches_per_connection_max),
        ("max_fuel", quota.fuel_max),
    ];
    if let Some(broker) = broker {
        // Lossless: memory sizes fit into 64 bits.
        let bytes = |it: usize| it as u64;
        all.extend([
            ("max_packet_bytes", bytes(broker.packet_bytes_max)),
            ("max_queue_bytes", bytes(broker.queue_bytes_max)),
            ("max_total_queue_bytes", bytes(broker.queue_bytes_total_max)),
            ("max_connections", bytes(broker.connections_max)),
            ("max_sessions", bytes(broker.sessions_max)),
            (
                "max_client_subscriptions",
                bytes(broker.subscriptions_per_session_max),
            ),
            ("max_client_in_flight", broker.receive_max.into()),
        ]);
        let rates = [
            ("max_client_rate", broker.publishes_per_second_max),
            ("max_rate", broker.publishes_per_second_total_max),
        ];
        // Zero means unlimited.
        let rates = rates.into_iter().filter(|(_, rate)| *rate > 0);
        all.extend(rates.map(|(name, rate)| (name, rate.into())));
    }
    all
}
