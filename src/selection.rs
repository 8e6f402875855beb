//! Which fields of a request count.

use actix_web::HttpRequest;

use crate::{digest::Digest, json::Pointer};

/// Which parts of a JSON body count, by JSON pointers (RFC 6901) such as `/items/0/sku`. Other bodies
/// count as a whole.
///
/// ```
/// use actix_idempotency::Fields;
///
/// // all but what every attempt draws anew
/// let fields = Fields::all_but(["/requestTime", "/nonce"]);
/// // a null member is as good as none
/// let fields = Fields::all().drop_nulls();
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fields {
    which: Which,
    drops_nulls: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Which {
    All,
    Raw,
    None,
    Only(Vec<(String, Pointer)>),
    AllBut(Vec<(String, Pointer)>),
}

impl Fields {
    /// All fields of the canonical body. The default of a policy.
    #[must_use]
    pub fn all() -> Self {
        Self { which: Which::All, drops_nulls: false }
    }

    /// The bytes of the body as they are: the order of members and white space count.
    #[must_use]
    pub fn raw() -> Self {
        Self { which: Which::Raw, drops_nulls: false }
    }

    /// No body: method, path and query alone.
    #[must_use]
    pub fn none() -> Self {
        Self { which: Which::None, drops_nulls: false }
    }

    /// These fields. One that is absent counts as absent.
    ///
    /// # Panics
    ///
    /// For what is no JSON pointer.
    #[track_caller]
    #[must_use]
    pub fn only<P: AsRef<str>>(pointers: impl IntoIterator<Item = P>) -> Self {
        Self { which: Which::Only(parsed("Fields::only", pointers)), drops_nulls: false }
    }

    /// All but these fields: what every attempt draws anew, such as a nonce or the time.
    ///
    /// # Panics
    ///
    /// For what is no JSON pointer.
    #[track_caller]
    #[must_use]
    pub fn all_but<P: AsRef<str>>(pointers: impl IntoIterator<Item = P>) -> Self {
        Self { which: Which::AllBut(parsed("Fields::all_but", pointers)), drops_nulls: false }
    }

    /// A member that is `null` counts as absent.
    #[must_use]
    pub fn drop_nulls(mut self) -> Self {
        self.drops_nulls = true;
        self
    }

    /// Of these fields of this body, what counts.
    pub(crate) fn add(&self, digest: &mut Digest, request: &HttpRequest, body: &[u8]) {
        let body_as_json = match &self.which {
            Which::None => return,
            Which::Raw => None,
            _ => crate::fingerprint::json_of(request, body),
        };
        let Some(mut json) = body_as_json else {
            return crate::fingerprint::add_bytes(digest, request, body, self.which == Which::Raw);
        };
        if self.drops_nulls {
            json.drop_nulls();
        }
        digest.part("json");
        match &self.which {
            Which::Only(pointers) => {
                for (text, pointer) in pointers {
                    digest.part(text);
                    if let Some(value) = json.at(pointer) {
                        value.digest(digest);
                    } else {
                        digest.part("absent");
                    }
                }
            }
            Which::AllBut(pointers) => {
                pointers.iter().for_each(|(_, pointer)| json.remove(pointer));
                json.digest(digest);
            }
            Which::All | Which::Raw | Which::None => json.digest(digest),
        }
    }

    /// What tells two choices apart.
    pub(crate) fn add_recipe(&self, digest: &mut Digest) {
        let (name, pointers): (_, &[(String, Pointer)]) = match &self.which {
            Which::All => ("all", &[]),
            Which::Raw => ("raw", &[]),
            Which::None => ("none", &[]),
            Which::Only(pointers) => ("only", pointers),
            Which::AllBut(pointers) => ("all but", pointers),
        };
        digest.part(name).part(if self.drops_nulls { "nulls dropped" } else { "" });
        pointers.iter().for_each(|(text, _)| {
            digest.part(text);
        });
    }

    /// In words, for the published document.
    pub(crate) fn in_words(&self) -> String {
        let list = |pointers: &[(String, Pointer)]| {
            pointers.iter().map(|(text, _)| text.as_str()).collect::<Vec<_>>().join(", ")
        };
        let which = match &self.which {
            Which::All => "the whole body (JSON in canonical form)".to_owned(),
            Which::Raw => "the bytes of the body".to_owned(),
            Which::None => "no part of the body".to_owned(),
            Which::Only(pointers) => format!("these fields of the body: {}", list(pointers)),
            Which::AllBut(pointers) => format!("the body without these fields: {}", list(pointers)),
        };
        if self.drops_nulls { format!("{which}; null members count as absent") } else { which }
    }
}

#[track_caller]
fn parsed<P: AsRef<str>>(setting: &str, pointers: impl IntoIterator<Item = P>) -> Vec<(String, Pointer)> {
    let parsed = |text: P| match Pointer::parse(text.as_ref()) {
        Some(pointer) => (text.as_ref().to_owned(), pointer),
        None => panic!("{setting}: {:?} is no JSON pointer (RFC 6901): it starts with /", text.as_ref()),
    };
    // Not `map`: the panic is to name the caller.
    let mut all = Vec::new();
    for text in pointers {
        all.push(parsed(text));
    }
    all
}

#[cfg(test)]
mod tests {
    use actix_web::test::TestRequest;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn of(fields: &Fields, content_type: &str, body: &str) -> [u8; 32] {
        let request = TestRequest::post().insert_header(("content-type", content_type)).to_http_request();
        let mut digest = Digest::new("test");
        fields.add(&mut digest, &request, body.as_bytes());
        digest.finish()
    }

    fn json(fields: &Fields, body: &Value) -> [u8; 32] {
        of(fields, "application/json", &body.to_string())
    }

    #[test]
    fn what_is_chosen_counts_with_its_name_and_whether_it_is_there() {
        let fields = Fields::only(["/a", "/b/0"]);
        let of = |body| json(&fields, &body);
        assert_eq!(of(json!({"a": 1, "b": [2], "c": 3})), of(json!({"b": [2, 4], "a": 1})));
        assert_ne!(of(json!({"a": 1})), of(json!({"b": [1]})));
        assert_ne!(of(json!({"a": "absent"})), of(json!({})));
        assert_ne!(of(json!({"a": null})), of(json!({})));
        let fields = fields.clone().drop_nulls();
        assert_eq!(json(&fields, &json!({"a": null})), json(&fields, &json!({})));
    }

    #[test]
    fn where_there_is_no_json_the_body_counts_as_a_whole_under_every_choice_but_none() {
        for fields in [Fields::all(), Fields::raw(), Fields::only(["/a"]), Fields::all_but(["/a"])] {
            let of = |body| of(&fields, "text/plain", body);
            assert_ne!(of(r#"{"a":1}"#), of(r#"{"a":1} "#), "{fields:?}");
            assert_eq!(of("a"), of("a"));
        }
        let none = Fields::none();
        assert_eq!(of(&none, "text/plain", "a"), of(&none, "application/json", "1"));
    }

    #[test]
    fn different_choices_have_different_recipes_and_words() {
        let all = [
            Fields::all(),
            Fields::all().drop_nulls(),
            Fields::raw(),
            Fields::none(),
            Fields::only(["/a"]),
            Fields::only(["/a", "/b"]),
            Fields::only(["/a/b"]),
            Fields::all_but(["/a"]),
            Fields::all_but(["/a"]).drop_nulls(),
        ];
        let recipe = |fields: &Fields| {
            let mut digest = Digest::new("test");
            fields.add_recipe(&mut digest);
            digest.finish()
        };
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| recipe(a) != recipe(b) && a.in_words() != b.in_words()), "{a:?}");
        }
    }

    proptest! {
        #[test]
        fn what_is_left_out_never_counts_and_the_rest_always_does(
            a in any::<i64>(), left_out in any::<i64>(), other in any::<i64>(), name in "[a-z~/\"\\\\é]{1,5}",
        ) {
            let pointer = format!("/x/{}", name.replace('~', "~0").replace('/', "~1"));
            let fields = Fields::all_but([&pointer]);
            let body = |a: i64, value: i64| json!({"a": a, "x": {&name: value}});
            prop_assert_eq!(json(&fields, &body(a, left_out)), json(&fields, &body(a, other)));
            prop_assert_eq!(a == other, json(&fields, &body(a, 1)) == json(&fields, &body(other, 1)));
        }
    }
}
