//! Somebody who looks at the pages of an inspector and sends its forms, as a browser would.

use std::collections::BTreeMap;

use reqwest::{Client, RequestBuilder};
use serde_json::Value;

use super::{
    client::{Answer, RequestExt, client},
    forms::FormExt,
};

pub struct Operator {
    client: Client,
    /// Where the inspector is, without a slash.
    pub at: String,
}

impl Operator {
    pub fn at(url: String) -> Self {
        Self { client: client(), at: url }
    }

    pub fn get(&self, page: &str) -> RequestBuilder {
        self.client.get(format!("{}/{page}", self.at))
    }

    /// A POST that says nothing of where it comes from.
    pub fn post(&self, page: &str) -> RequestBuilder {
        self.client.post(format!("{}/{page}", self.at))
    }

    pub async fn page(&self, page: &str) -> Answer {
        self.get(page).answer().await
    }

    #[track_caller]
    pub fn json(&self, page: &str) -> impl Future<Output = Value> {
        let place = std::panic::Location::caller();
        let asked = self.get(page);
        async move {
            let answer = asked.answer().await;
            assert_eq!(answer.status, 200, "{place}: {answer:?}");
            assert_eq!(answer.header("content-type"), Some("application/json"), "{place}");
            answer.json()
        }
    }

    /// The id of the only row that a search finds.
    pub async fn id(&self, key: &str) -> String {
        let found = self.json(&format!("search.json?key={key}")).await;
        assert_eq!(found["keys"].as_array().unwrap().len(), 1, "{found}");
        found["keys"][0]["id"].as_str().unwrap().to_owned()
    }

    /// What a page asks for confirmation with.
    pub async fn question(&self, page: &str) -> BTreeMap<String, String> {
        let page = self.page(page).await;
        assert_eq!(page.status, 200);
        hidden_fields(&page.text())
    }

    /// The button of that page, and where it leads to.
    pub async fn confirm(&self, action: &str, form: &BTreeMap<String, String>) -> Answer {
        let fields: Vec<_> = form.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let sent = self.post(action).header("sec-fetch-site", "same-origin").form(&fields).answer().await;
        assert_eq!(sent.status, 303, "{sent:?}");
        self.page(sent.header("location").unwrap()).await
    }

    /// Both at once.
    pub async fn act(&self, action: &str, id: &str) -> Answer {
        let form = self.question(&format!("{action}?id={id}")).await;
        self.confirm(action, &form).await
    }

    /// The events that have happened, with their totals.
    pub async fn events(&self) -> BTreeMap<String, u64> {
        let overview = self.json("overview.json").await;
        let events = overview["events"].as_array().unwrap().iter();
        let totals = events.map(|event| {
            let total = event["total"].as_u64().unwrap();
            let lately: u64 = event["lately"].as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).sum();
            assert_eq!(total, lately, "{event}: all of it was lately");
            (event["event"].as_str().unwrap().to_owned(), total)
        });
        totals.filter(|(_, total)| *total > 0).collect()
    }
}

fn hidden_fields(page: &str) -> BTreeMap<String, String> {
    let inputs = page.split("<input type=\"hidden\" name=\"").skip(1);
    let fields = inputs.map(|input| {
        let (name, rest) = input.split_once("\" value=\"").unwrap();
        let value = rest.split('"').next().unwrap();
        (name.to_owned(), html_escape::decode_html_entities(value).into_owned())
    });
    fields.collect()
}
