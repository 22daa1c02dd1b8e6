//! Parses orders over MQTT, and assembles their files from chunks.
//!
//! The signature of an order must be verified before this module parses it. Chunks may arrive in
//! any order and any number of times. This module does no I/O and reads no clock.

use serde::{Deserialize, Serialize};

use statehouse_config::{ClientId, limits, policy_file_bytes_max};
use statehouse_core::policy::{CanaryRule, Digest};

/// A command to one or more stores about a policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Order {
    /// Must be higher than the serial of every order before, so that no order can be replayed.
    pub serial: u64,
    /// The names of the stores that carry it out. Without a target, a captured order could be
    /// published to every store that trusts the same key.
    #[serde(default)]
    pub stores: Vec<String>,
    /// What to do.
    pub action: Action,
    /// The policy. Without one, the shadow or the canary ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// The size of its file in bytes, if the file follows in chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// The BLAKE3 of each chunk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chunks: Vec<Digest>,
    /// The share of requests that a shadow receives, in thousandths; all of them if it is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_mille: Option<u16>,
    /// The requests that a canary handles.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<CanaryRule>,
}

/// What to do with a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Load it.
    Load,
    /// Make it the active policy.
    Promote,
    /// Make the previous policy the active one.
    Rollback,
    /// Compare it with the active policy.
    Shadow,
    /// Make it the canary, which handles some requests.
    Canary,
    /// Unload it.
    Unload,
}

/// Why an order or a chunk is refused. The text is a sentence for its sender.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// The order is not JSON, or has another form.
    #[error("the order is not valid: {0}")]
    Form(String),
    /// The order has no target.
    #[error(
        "the order names no store: sign it with the store's name in `stores` (`statehouse policy push --store NAME`)"
    )]
    NoStore,
    /// The order has too many targets.
    #[error("the order names {0} stores, and an order names at most {max}", max = limits::ORDER_STORES_MAX)]
    Stores(usize),
    /// A target cannot be the name of a store.
    #[error("`stores` of the order: {0}")]
    StoreName(String),
    /// The order has other targets.
    #[error("the order is for other stores: the name of this store is {0}")]
    OtherStore(String),
    /// The order lacks a field that its action needs.
    #[error("the order lacks `{0}`, which its action needs")]
    Lacks(&'static str),
    /// The file is too large.
    #[error("the order is for a file of {0} bytes, and this store takes at most {max}", max = policy_file_bytes_max())]
    Size(u64),
    /// The order has too many chunks, or too few for the size of the file.
    #[error(
        "the file cannot be sent in {0} chunks: there may be at most {chunks} of at most {bytes} bytes",
        chunks = limits::ORDER_CHUNKS_MAX, bytes = limits::CHUNK_BYTES_MAX
    )]
    Chunks(usize),
    /// The order has no chunk with this number.
    #[error("the order has no chunk of this number")]
    Index,
    /// The chunk is too large.
    #[error("a chunk has at most {max} bytes", max = limits::CHUNK_BYTES_MAX)]
    ChunkSize,
    /// The chunk has another hash.
    #[error("the chunk is not the one that the order names")]
    Chunk,
    /// The chunks are complete, but do not make the file that the order names.
    #[error("the chunks do not make the file that the order names")]
    File,
}

impl Order {
    /// Parses an order with a verified signature. Refuses it if it is not for this store.
    pub fn parse(payload: &[u8], store: &str) -> Result<Self, OrderError> {
        let order: Self =
            serde_json::from_slice(payload).map_err(|error| OrderError::Form(error.to_string()))?;
        order.check_target(store)?;
        order.check_parts()?;
        Ok(order)
    }

    fn check_target(&self, store: &str) -> Result<(), OrderError> {
        let count = self.stores.len();
        if count == 0 {
            return Err(OrderError::NoStore);
        }
        if count > limits::ORDER_STORES_MAX {
            return Err(OrderError::Stores(count));
        }
        for name in &self.stores {
            let _: ClientId = name.parse().map_err(OrderError::StoreName)?;
        }
        match self.stores.iter().any(|name| name == store) {
            true => Ok(()),
            false => Err(OrderError::OtherStore(store.to_owned())),
        }
    }

    /// Checks that the order has what its action needs.
    fn check_parts(&self) -> Result<(), OrderError> {
        let needs_digest = match self.action {
            Action::Load | Action::Promote | Action::Unload => true,
            Action::Rollback | Action::Shadow | Action::Canary => !self.chunks.is_empty(),
        };
        if needs_digest && self.digest.is_none() {
            return Err(OrderError::Lacks("digest"));
        }
        if self.action == Action::Load && self.chunks.is_empty() {
            return Err(OrderError::Lacks("chunks"));
        }
        if self.action == Action::Canary && self.digest.is_some() && self.rule.is_none() {
            return Err(OrderError::Lacks("rule"));
        }
        if self.chunks.is_empty() {
            return Ok(());
        }
        let size = self.size.ok_or(OrderError::Lacks("size"))?;
        if size > policy_file_bytes_max() {
            return Err(OrderError::Size(size));
        }
        let count = self.chunks.len();
        let bytes_max = (count as u64).saturating_mul(limits::CHUNK_BYTES_MAX as u64);
        if count > limits::ORDER_CHUNKS_MAX || size > bytes_max {
            return Err(OrderError::Chunks(count));
        }
        Ok(())
    }

    /// The JSON of the order, as it is signed and sent.
    pub fn payload(&self) -> Vec<u8> {
        // This cannot fail: all keys of maps are strings, and the writer is memory.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// A file that arrives in chunks.
#[derive(Debug)]
pub(super) struct Assembly {
    order: Order,
    chunks: Vec<Option<Vec<u8>>>,
    missing: usize,
    /// The bytes of the file that have not arrived, by the size in the order.
    missing_bytes: u64,
}

impl Assembly {
    pub(super) fn new(order: Order) -> Self {
        let missing = order.chunks.len();
        Self {
            missing_bytes: order.size.unwrap_or_default(),
            order,
            chunks: vec![None; missing],
            missing,
        }
    }

    pub(super) fn order(&self) -> &Order {
        &self.order
    }

    /// The number of chunks that have not arrived.
    pub(super) fn missing(&self) -> usize {
        self.missing
    }

    /// Adds a chunk. A duplicate has no effect.
    pub(super) fn put(&mut self, index: usize, bytes: &[u8]) -> Result<(), OrderError> {
        let named = self.order.chunks.get(index).ok_or(OrderError::Index)?;
        if bytes.len() > limits::CHUNK_BYTES_MAX {
            return Err(OrderError::ChunkSize);
        }
        if Digest::of(bytes) != *named {
            return Err(OrderError::Chunk);
        }
        // `chunks` is as long as the list of hashes, so `index` is in range.
        if let Some(place @ None) = self.chunks.get_mut(index) {
            // Otherwise an order could make the store buffer more than the largest file.
            let left = self.missing_bytes.checked_sub(bytes.len() as u64);
            self.missing_bytes = left.ok_or(OrderError::File)?;
            *place = Some(bytes.to_vec());
            self.missing -= 1;
        }
        Ok(())
    }

    /// Returns the file. Fails if a chunk is missing or the file is not the named one.
    pub(super) fn file(self) -> Result<(Order, Vec<u8>), OrderError> {
        let file: Vec<u8> = self.chunks.into_iter().flatten().flatten().collect();
        if self.missing > 0
            || self.order.size != Some(file.len() as u64)
            || self.order.digest != Some(Digest::of(&file))
        {
            return Err(OrderError::File);
        }
        Ok((self.order, file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(file: &[u8], chunk_bytes: usize) -> Order {
        Order {
            serial: 7,
            stores: vec!["here".into()],
            action: Action::Promote,
            digest: Some(Digest::of(file)),
            size: Some(file.len() as u64),
            chunks: file.chunks(chunk_bytes).map(Digest::of).collect(),
            per_mille: None,
            rule: None,
        }
    }

    #[test]
    fn chunks_in_any_order_and_duplicates_make_the_file() {
        let file: Vec<u8> = (0..=255).cycle().take(1000).collect();
        let order = order(&file, 300);
        assert_eq!(Order::parse(&order.payload(), "here").unwrap(), order);
        let mut assembly = Assembly::new(order.clone());
        let chunks: Vec<&[u8]> = file.chunks(300).collect();
        for index in [3, 0, 0, 2, 3] {
            assembly.put(index, chunks[index]).unwrap();
        }
        assert_eq!(assembly.missing(), 1);
        assert_eq!(assembly.put(1, chunks[0]), Err(OrderError::Chunk));
        let large = vec![0; limits::CHUNK_BYTES_MAX + 1];
        assert_eq!(assembly.put(1, &large), Err(OrderError::ChunkSize));
        assert_eq!(assembly.put(4, chunks[0]), Err(OrderError::Index));
        assembly.put(1, chunks[1]).unwrap();
        assert_eq!(assembly.file().unwrap(), (order, file));
    }

    #[test]
    fn a_file_other_than_the_named_one_is_refused() {
        let file = b"0123456789";
        let mut short = Assembly::new(Order {
            size: Some(9),
            ..order(file, 5)
        });
        short.put(0, &file[..5]).unwrap();
        assert_eq!(short.put(1, &file[5..]), Err(OrderError::File));
        for wrong in [
            Order {
                size: Some(11),
                ..order(file, 5)
            },
            Order {
                digest: Some(Digest::of(b"other")),
                ..order(file, 5)
            },
        ] {
            let mut assembly = Assembly::new(wrong);
            for (index, chunk) in file.chunks(5).enumerate() {
                assembly.put(index, chunk).unwrap();
            }
            assert_eq!(assembly.file(), Err(OrderError::File));
        }
        assert_eq!(Assembly::new(order(file, 5)).file(), Err(OrderError::File));
    }

    #[test]
    fn an_order_without_a_needed_field_or_too_large_is_refused() {
        let whole = |text: &str| {
            let text = text.replace("\"serial\"", "\"stores\":[\"here\"],\"serial\"");
            Order::parse(text.as_bytes(), "here")
        };
        let parse = |text: &str| whole(text).unwrap_err().to_string();
        let digest = Digest::of(b"x");
        for (text, says) in [
            ("", "is not valid"),
            ("{}", "serial"),
            (r#"{"serial":1,"action":"explode"}"#, "explode"),
            (r#"{"serial":1,"action":"rollback","more":1}"#, "more"),
            (r#"{"serial":1,"action":"promote"}"#, "`digest`"),
            (r#"{"serial":-1,"action":"rollback"}"#, "-1"),
            (
                &format!(r#"{{"serial":1,"action":"load","digest":"{digest}"}}"#),
                "`chunks`",
            ),
            (
                &format!(
                    r#"{{"serial":1,"action":"load","digest":"{digest}","chunks":["{digest}"]}}"#
                ),
                "`size`",
            ),
            (
                &format!(
                    r#"{{"serial":1,"action":"load","digest":"{digest}","size":999999999999,"chunks":["{digest}"]}}"#
                ),
                "999999999999 bytes",
            ),
            (
                &format!(
                    r#"{{"serial":1,"action":"load","digest":"{digest}","size":300000,"chunks":["{digest}"]}}"#
                ),
                "1 chunks",
            ),
        ] {
            assert!(parse(text).contains(says), "{text}: {}", parse(text));
        }
        let canary = format!(r#"{{"serial":1,"action":"canary","digest":"{digest}"}}"#);
        assert!(parse(&canary).contains("`rule`"));
        let rule = canary.replace('}', r#","rule":{"percent":5}}"#);
        assert!(whole(&rule).is_ok(), "{rule}");
        assert!(whole(r#"{"serial":1,"action":"shadow"}"#).is_ok());
        assert!(whole(r#"{"serial":1,"action":"rollback"}"#).is_ok());
    }

    #[test]
    fn an_order_is_only_for_the_stores_it_names() {
        let parse = |stores: &str, store: &str| {
            let text = format!(r#"{{"serial":1,"action":"rollback"{stores}}}"#);
            Order::parse(text.as_bytes(), store).map(|order| order.stores)
        };
        for stores in [r#","stores":["a"]"#, r#","stores":["b","a"]"#] {
            assert!(parse(stores, "a").is_ok(), "{stores}");
            for other in ["c", "A", "", "*"] {
                let refused = Err(OrderError::OtherStore(other.into()));
                assert_eq!(parse(stores, other), refused, "{stores}");
            }
        }
        // Names are compared byte by byte: no pattern matches every store.
        for stores in [r#","stores":["*"]"#, r#","stores":["a*"]"#] {
            assert_eq!(parse(stores, "a"), Err(OrderError::OtherStore("a".into())));
        }
        for stores in ["", r#","stores":[]"#] {
            assert_eq!(parse(stores, "a"), Err(OrderError::NoStore));
        }
        let list = |names: &[&str]| format!(r#","stores":{}"#, serde_json::json!(names));
        let most = ["a"; limits::ORDER_STORES_MAX + 1];
        assert!(parse(&list(&most[1..]), "a").is_ok());
        let too_many = Err(OrderError::Stores(most.len()));
        assert_eq!(parse(&list(&most), "a"), too_many);
        let long = "a".repeat(limits::BROKER_CLIENT_ID_BYTES_MAX + 1);
        assert!(parse(&list(&[&long[1..]]), &long[1..]).is_ok());
        for name in [&long, "", "b\n"] {
            let refused = parse(&list(&["a", name]), "a");
            assert!(matches!(refused, Err(OrderError::StoreName(_))), "{name:?}");
        }
        let form = parse(r#","stores":"a""#, "a");
        assert!(matches!(form, Err(OrderError::Form(_))), "{form:?}");
    }
}
